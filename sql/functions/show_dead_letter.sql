-- show_dead_letter: one dead letter whole, with its body. That of an event is read where it stands, in the event store.
-- in: p_dead_letter_id    out: one row, or none
-- locks: none    cost: two probes
create or replace function @schema@.show_dead_letter(p_dead_letter_id int8)
returns table (
    dead_letter_id int8, dead_at timestamptz, destination text, partition int4, lane_id uuid, stream_id uuid,
    stream_seq int8, version int8, "position" int8, stored_at timestamptz, message_id uuid, correlation_id uuid,
    causation_id uuid, trace_id uuid, span_id int8, trace_flags int2, type_name text, content_type text,
    attempts int4, retried int4, reason int2, error text, error_cut bool, error_fingerprint text, metadata bytea,
    payload bytea)
language sql stable
as $$
    select d.dead_letter_id, d.dead_at, d.destination, d.partition, d.lane_id, d.stream_id, d.stream_seq, d.version,
        d.position, d.stored_at, d.message_id, d.correlation_id, d.causation_id, d.trace_id, d.span_id, d.trace_flags,
        d.type_name, coalesce(d.content_type, 'application/json'), d.attempts, d.retried, d.reason, d.error,
        d.error_cut, d.error_fingerprint, coalesce(e.metadata, d.metadata), coalesce(e.payload, d.payload)
    from @schema@.wh_dead_letter d
    left join @schema@.wh_event_store e
        on e.stream_id = d.lane_id and e.version = nullif(d.version, 0)
    where d.dead_letter_id = p_dead_letter_id
$$;
