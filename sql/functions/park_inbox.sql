-- park_inbox: parks lanes whose head failed, or parks them anew after another failure.
-- in: p_consumer; arrays with an element a lane: p_lane_ids, p_message_ids (the head; its body is kept: keep_inbox),
--     p_attempts (of the head, this one included), p_reasons (numbers of failures), p_errors (texts, cut to 8 KiB),
--     p_due_in_ms (from now)
-- out: how many lanes
-- held: a lane that is held stays so: an operator lets it go on
-- locks: the rows of wh_inbox_parked, by ascending lane. The caller holds the lanes' locks
--     Beside other calls for other lanes in one transaction: lock_inbox first, for all of them
-- cost: one statement, a row a lane
create or replace function @schema@.park_inbox(
    p_consumer int2, p_lane_ids uuid[], p_message_ids uuid[], p_attempts int4[], p_reasons int2[], p_errors text[],
    p_due_in_ms int8[])
returns int4
language sql volatile
as $$
    with parked as (
        insert into @schema@.wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason,
            error_cut, error)
        select clock_timestamp() + m.due_in_ms * interval '1 ms', m.lane_id, m.message_id,
            @schema@.compute_partition(m.lane_id, (select i.partition_count from @schema@.wh_installation i)),
            m.attempts, p_consumer, m.reason, coalesce(octet_length(m.error) > 8192, false),
            @schema@.wh_cut_error(m.error)
        from unnest(p_lane_ids, p_message_ids, p_attempts, p_reasons, p_errors, p_due_in_ms)
            m(lane_id, message_id, attempts, reason, error, due_in_ms)
        order by m.lane_id
        on conflict (consumer, lane_id) do update
        set due = case when k.held then k.due else excluded.due end, message_id = excluded.message_id,
            attempts = excluded.attempts, reason = excluded.reason, error_cut = excluded.error_cut, error = excluded.error,
            leased_to = null, leased_through = null, leased_rows = null -- an earlier worker's, whose time was over
        returning 1
    )
    select count(*)::int4 from parked
$$;
