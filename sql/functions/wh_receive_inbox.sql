-- wh_receive_inbox: stores deliveries of a worker without a session: remembered and kept, to be handed out in order.
-- in: see process_inbox_batch    out: a state an element, in input order: 0 stored, 1 a duplicate, 2 busy
-- errors: 22023 for the nil uuid as a stream; those of remember_inbox and keep_inbox
-- locks: lanes (to the end of the transaction, by trying); as remember_inbox and keep_inbox; rows of wh_inbox_parked
-- cost: three statements, rows a message and a probe a lane
create or replace function @schema@.wh_receive_inbox(
    p_consumer int2, p_messages uuid[], p_stream_ids uuid[], p_types text[], p_payloads bytea[], p_source text,
    p_content_types text[], p_metadata bytea[], p_correlation_ids uuid[], p_causation_ids uuid[], p_trace_ids uuid[],
    p_span_ids int8[], p_trace_flags int2[])
returns int2[]
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
    v_lanes uuid[];
    v_locked uuid[];
    v_ids uuid[];
    v_new bool[];
    v_stored uuid[];
    v_turns int8[];
begin
    if cardinality(p_types) <> cardinality(p_messages) or cardinality(p_payloads) <> cardinality(p_messages)
        or cardinality(p_stream_ids) not in (0, cardinality(p_messages))
        or array_position(p_messages, null) is not null
    then
        raise exception 'deliveries: % message ids, % streams, % types, % payloads, and no null among the ids',
            cardinality(p_messages), cardinality(p_stream_ids), cardinality(p_types), cardinality(p_payloads)
            using errcode = '22023';
    end if;
    if '00000000-0000-0000-0000-000000000000' = any (p_stream_ids) then
        raise exception 'the nil uuid is not a stream id' using errcode = '22023',
            hint = 'Give null for a message without order, or its real stream.';
    end if;
    v_lanes := array(
        select coalesce(m.stream_id, wh_lane(m.message_id))
        from unnest(p_messages, p_stream_ids) with ordinality m(message_id, stream_id, turn)
        where m.message_id is not null order by m.turn);
    v_locked := array(
        select l.lane_id from (select distinct u.lane_id from unnest(v_lanes) u(lane_id) offset 0) l
        where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, l.lane_id)));

    -- Later statements than the locks: who had them before has committed.
    v_ids := array(
        select m.message_id from unnest(p_messages, v_lanes) with ordinality m(message_id, lane_id, turn)
        where m.lane_id = any (v_locked) order by m.turn);
    v_new := remember_inbox(p_consumer, v_ids);
    v_stored := array(select n.message_id from unnest(v_ids, v_new) n(message_id, is_new) where n.is_new);
    -- Of the same id the first counts.
    v_turns := array(
        select min(m.turn) from unnest(p_messages, v_lanes) with ordinality m(message_id, lane_id, turn)
        where m.message_id = any (v_stored) and m.lane_id = any (v_locked)
        group by m.message_id);
    perform keep_inbox(p_consumer, p_source, array_agg(m.lane_id order by m.turn),
        array_agg(m.message_id order by m.turn), array_agg(m.stream_id order by m.turn),
        array_agg(m.type_name order by m.turn), array_agg(m.payload order by m.turn),
        array_agg(m.content_type order by m.turn), array_agg(m.metadata order by m.turn),
        array_agg(m.correlation_id order by m.turn), array_agg(m.causation_id order by m.turn),
        array_agg(m.trace_id order by m.turn), array_agg(m.span_id order by m.turn),
        array_agg(m.trace_flags order by m.turn))
    from unnest(v_lanes, p_messages, p_stream_ids, p_types, p_payloads, p_content_types, p_metadata, p_correlation_ids,
        p_causation_ids, p_trace_ids, p_span_ids, p_trace_flags) with ordinality
        m(lane_id, message_id, stream_id, type_name, payload, content_type, metadata, correlation_id, causation_id,
            trace_id, span_id, trace_flags, turn)
    where m.turn = any (v_turns)
    having count(*) > 0;
    insert into wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
    select distinct on (m.lane_id) clock_timestamp(), m.lane_id, m.message_id,
        compute_partition(m.lane_id, (select i.partition_count from wh_installation i)), 0, p_consumer, 0
    from unnest(v_lanes, p_messages) with ordinality m(lane_id, message_id, turn)
    where m.turn = any (v_turns)
    order by m.lane_id, m.turn
    on conflict (consumer, lane_id) do nothing;
    return array(
        select (case
            when m.turn = any (v_turns) then 0
            when not m.lane_id = any (v_locked) then 2
            else 1 end)::int2
        from unnest(v_lanes) with ordinality m(lane_id, turn) order by m.turn);
end
$$;
