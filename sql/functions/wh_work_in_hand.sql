-- wh_work_in_hand: what a worker has in hand, with its messages, by position: along a stream, in order.
-- in: p_incarnation; p_handed_at: when the call handed out; p_again: also what was handed out before
-- out: a row a message and destination. flags: 2 it was handed out before, 8 it is an event, 32 it has failed before
-- locks: none    cost: a probe a reference, in each segment for a message that is no event
create or replace function @schema@.wh_work_in_hand(p_incarnation int4, p_handed_at timestamptz, p_again bool)
returns table (
    message_id uuid, destination text, stream_id uuid, stream_seq int8, version int8, "position" int8,
    "partition" int4, fence int8, attempts int4, status int4, flags int4, type_name text, content_type text,
    payload bytea, metadata bytea, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8, trace_flags int2,
    stored_at timestamptz)
language sql stable
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
as $$
    select h.message_id, h.destination, coalesce(e.stream_id, o.stream_id, r.stream_id), h.stream_seq, h.version,
        coalesce(e.position, o.position, r.position), h.partition, p.fence, coalesce(k.attempts, 0),
        case when h.version > 0 then 3 else 1 end,
        case when h.handed_at is distinct from p_handed_at then 2 else 0 end + case when h.version > 0 then 8 else 0 end
            + case when k.attempts > 0 then 32 else 0 end,
        coalesce(e.type_name, o.type_name, r.type_name), coalesce(e.content_type, o.content_type, r.content_type),
        coalesce(e.payload, o.payload, r.payload), coalesce(e.metadata, o.metadata, r.metadata),
        coalesce(e.correlation_id, o.correlation_id, r.correlation_id),
        coalesce(e.causation_id, o.causation_id, r.causation_id), coalesce(e.trace_id, o.trace_id, r.trace_id),
        coalesce(e.span_id, o.span_id, r.span_id), coalesce(e.trace_flags, o.trace_flags, r.trace_flags),
        coalesce(e.stored_at, o.stored_at, r.stored_at)
    from wh_handed_out h
    join wh_partition p on p.partition = h.partition
    left join wh_event_store e on h.version > 0 and e.stream_id = h.lane_id and e.version = h.version
    left join wh_outbox o on h.version = 0 and not h.beside and o.lane_id = h.lane_id and o.stream_seq = h.stream_seq
    left join wh_parked_reference r on h.beside and r.lane_id = h.lane_id and r.destination = h.destination
        and r.stream_seq = h.stream_seq
    left join wh_parked k on k.lane_id = h.lane_id and k.destination = h.destination and k.stream_seq = h.stream_seq
    where h.incarnation = p_incarnation and not h.decided and (p_again or h.handed_at = p_handed_at)
    order by coalesce(e.position, o.position, r.position), h.destination
$$;
