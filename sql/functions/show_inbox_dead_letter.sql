-- show_inbox_dead_letter: one dead letter of the inbox whole, with its body.
-- in: p_dead_letter_id    out: one row, or none
-- locks: none    cost: a probe
create or replace function @schema@.show_inbox_dead_letter(p_dead_letter_id int8)
returns table (
    dead_letter_id int8, dead_at timestamptz, consumer text, source text, lane_id uuid, stream_id uuid,
    message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8, trace_flags int2,
    received_at timestamptz, type_name text, content_type text, attempts int4, retried int4, reason int2, error text,
    error_cut bool, error_fingerprint text, metadata bytea, payload bytea)
language sql stable
as $$
    select d.dead_letter_id, d.dead_at, c.name, d.source, d.lane_id, d.stream_id, d.message_id, d.correlation_id,
        d.causation_id, d.trace_id, d.span_id, d.trace_flags, d.received_at, d.type_name,
        coalesce(d.content_type, 'application/json'), d.attempts, d.retried, d.reason, d.error, d.error_cut,
        d.error_fingerprint, d.metadata, d.payload
    from @schema@.wh_inbox_dead_letter d
    join @schema@.wh_consumer c on c.consumer = d.consumer
    where d.dead_letter_id = p_dead_letter_id
$$;
