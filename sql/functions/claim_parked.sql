-- claim_parked: the first references kept beside the log for a lane, by number, with their messages.
-- in: p_lane_id, p_destination, p_rows_max
-- out: one row a reference. replayed: an operator has asked for this copy (retry_dead_letters, replay_events). In a lane
--     of a replay stream_id is not the lane's id
-- locks: none: only the owner of the partition writes them    cost: p_rows_max index probes
create or replace function @schema@.claim_parked(p_lane_id uuid, p_destination text, p_rows_max int4)
returns table (
    stream_seq int8, version int8, span_id int8, stream_id uuid, message_id uuid, correlation_id uuid,
    causation_id uuid, trace_id uuid, partition int4, trace_flags int2, type_name text, content_type text,
    metadata bytea, payload bytea, replayed bool)
language sql stable
as $$
    select k.stream_seq, k.version, coalesce(e.span_id, k.span_id), coalesce(e.stream_id, k.stream_id),
        coalesce(e.message_id, k.message_id), coalesce(e.correlation_id, k.correlation_id),
        coalesce(e.causation_id, k.causation_id), coalesce(e.trace_id, k.trace_id), k.partition,
        coalesce(e.trace_flags, k.trace_flags), coalesce(e.type_name, k.type_name),
        coalesce(e.content_type, k.content_type), coalesce(e.metadata, k.metadata), coalesce(e.payload, k.payload),
        k.retried > 0
    from (
        select k.*
        from @schema@.wh_parked_reference k
        where k.lane_id = p_lane_id and k.destination = p_destination
        order by k.stream_seq
        limit p_rows_max
    ) k
    left join @schema@.wh_event_store e on k.version > 0 and e.stream_id = k.lane_id and e.version = k.version
    order by k.stream_seq
$$;
