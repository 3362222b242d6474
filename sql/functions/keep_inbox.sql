-- keep_inbox: keeps the bodies of messages that outlive their first try: failed ones, and those behind them; and parks
-- their lanes, so that no body is ever without the row that brings it back.
-- in: p_consumer; p_source: where they came from; arrays with an element a message, in the order of arrival: p_lane_ids,
--     p_message_ids (remembered in this transaction: remember_inbox), p_stream_ids (null: none), p_type_names,
--     p_payloads, and where nothing is said null or absent: p_content_types, p_metadata, p_correlation_ids,
--     p_causation_ids, p_trace_ids, p_span_ids, p_trace_flags
-- out: how many were kept; one that is kept already is passed over
-- parked: a lane that has no row in wh_inbox_parked gets one that is due now. One that has is left as it is, whenever it
--     is due. Who buries what it keeps here, or parks the lane otherwise, does so afterwards (bury_inbox and
--     unpark_inbox, park_inbox)
-- order: `arrival` is drawn in input order, and under the lane's lock: along a lane it is the order of arrival
-- errors: 23502 for a null that must not be (arrays that are too short), 22xxx and 23xxx for an element that cannot be
-- locks: the rows it inserts; the rows of wh_inbox_parked, by ascending lane, those that were there too: who frees a lane
--     at the same time without its lock (unpark_inbox) waits, and sees the body, or is waited for. The caller holds the
--     lanes' locks (begin_inbox)
--     Beside other calls for other lanes in one transaction: lock_inbox first, for all of them
-- cost: one statement, a row a message, a probe and a lock a lane
create or replace function @schema@.keep_inbox(
    p_consumer int2, p_source text, p_lane_ids uuid[], p_message_ids uuid[], p_stream_ids uuid[], p_type_names text[],
    p_payloads bytea[], p_content_types text[] default null, p_metadata bytea[] default null,
    p_correlation_ids uuid[] default null, p_causation_ids uuid[] default null, p_trace_ids uuid[] default null,
    p_span_ids int8[] default null, p_trace_flags int2[] default null)
returns int4
language sql volatile
as $$
    with given as (
        select m.* from unnest(p_lane_ids, p_message_ids, p_stream_ids, p_type_names, p_payloads, p_content_types,
            p_metadata, p_correlation_ids, p_causation_ids, p_trace_ids, p_span_ids, p_trace_flags) with ordinality
            m(lane_id, message_id, stream_id, type_name, payload, content_type, metadata, correlation_id, causation_id,
            trace_id, span_id, trace_flags, turn)
    ), parked as (
        insert into @schema@.wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
        select distinct on (m.lane_id) clock_timestamp(), m.lane_id, m.message_id,
            @schema@.compute_partition(m.lane_id, (select i.partition_count from @schema@.wh_installation i)), 0,
            p_consumer, 0
        from given m
        order by m.lane_id, m.turn
        -- Locks the row that is there, and changes nothing.
        on conflict (consumer, lane_id) do update set due = k.due where false
    ), kept as (
        insert into @schema@.wh_inbox (span_id, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id,
            consumer, trace_flags, source, type_name, content_type, metadata, payload)
        select m.span_id, m.lane_id, m.stream_id, m.message_id, m.correlation_id, m.causation_id, m.trace_id,
            p_consumer, m.trace_flags, p_source, m.type_name, m.content_type, m.metadata, m.payload
        from given m
        order by m.turn
        on conflict (consumer, message_id) do nothing
        returning 1
    )
    select count(*)::int4 from kept
$$;
