-- checkpoint_subscription: writes where partitions stand, if they are still the member's. In the transaction that holds
-- the effects of the events, each has its effect exactly once.
-- in: p_subscription, p_incarnation; p_partitions, p_fences; p_resolved (one a partition), p_floor, p_target,
--     p_target_floor, p_position, p_before: the place behind the last event, as read_subscription answers it
-- out: nothing. The fences are one higher from the commit on
-- errors: CL020 if a partition is another's by now, or stands elsewhere (a transaction that was taken to be lost has
--     committed): roll back, and go on with what share_subscription answers; CL021 if the transaction had its id before
--     the events were read: begin it after them
-- locks: rows of the partitions until the end of the transaction; no advisory lock: the row that says who owns a
--     partition is the one that is written    cost: an update of each partition
create or replace function @schema@.checkpoint_subscription(
    p_subscription int4, p_incarnation int4, p_partitions int4[], p_fences int8[], p_resolved pg_snapshot[],
    p_floor int8, p_target pg_snapshot, p_target_floor int8, p_position int8, p_before bool) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_count int4;
    v_xmax xid8;
begin
    -- After a crash ids are given again from the last one that is written down on. What is named as read must lie below
    -- this transaction's own, which is written down with it.
    select max(x.xmax) into v_xmax
    from (
        select pg_snapshot_xmax(p_target) as xmax
        union all
        select pg_snapshot_xmax(r) from unnest(p_resolved) r
    ) x;
    if pg_current_xact_id() < v_xmax then
        raise exception 'the transaction has written before the events were read: begin it after them'
            using errcode = 'CL021';
    end if;
    update wh_subscription_partition p
    set fence = p.fence + 1, resolved = u.resolved, floor = p_floor, target = p_target, target_floor = p_target_floor,
        position = p_position,
        before_from = case when p_before then p.before_from else
            greatest(p.before_from, (select i.rebased_position from wh_installation i)) end,
        updated_at = clock_timestamp()
    from unnest(p_partitions, p_fences, p_resolved) u("partition", fence, resolved)
    where p.subscription = p_subscription and p.partition = u.partition and p.owner = p_incarnation
        and p.fence = u.fence;
    get diagnostics v_count = row_count;
    if v_count <> cardinality(p_partitions) then
        raise exception '% of % partitions are not at this member and place any more: roll back',
            cardinality(p_partitions) - v_count, cardinality(p_partitions) using errcode = 'CL020';
    end if;
end
$$;
