-- lock_inbox: the rows of all lanes that a transaction is going to change, before it changes the first: it keeps, parks,
-- buries and frees by a call each, every one of which takes its own lanes in their order, and together they have none.
-- in: p_consumer; arrays with an element a lane: p_lane_ids, p_message_ids (one of its messages)
-- out: how many lanes were not parked: they are now, and due. Each of them has to be kept something in (keep_inbox), or
--     freed again (unpark_inbox), by this transaction
-- order: a transaction that has taken its lanes here, or takes them all by one call, meets nobody over two of them: an
--     operator (retry_inbox_dead_letters, discard_inbox_dead_letters) takes them in the same order
-- locks: the rows of wh_inbox_parked, by ascending lane, those that were there too. The caller holds the lanes' locks
-- cost: one statement, a probe and a lock a lane
create or replace function @schema@.lock_inbox(p_consumer int2, p_lane_ids uuid[], p_message_ids uuid[]) returns int4
language sql volatile
as $$
    with parked as (
        insert into @schema@.wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
        select distinct on (m.lane_id) clock_timestamp(), m.lane_id, m.message_id,
            @schema@.compute_partition(m.lane_id, (select i.partition_count from @schema@.wh_installation i)), 0,
            p_consumer, 0
        from unnest(p_lane_ids, p_message_ids) with ordinality m(lane_id, message_id, turn)
        order by m.lane_id, m.turn
        -- Locks the row that is there, and changes nothing.
        on conflict (consumer, lane_id) do update set due = k.due where false
        returning 1
    )
    select count(*)::int4 from parked
$$;
