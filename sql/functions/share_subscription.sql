-- share_subscription: renews a member's lease, follows members that are gone, takes what is free up to an even share,
-- and answers what the member has, with where each partition stands.
-- in: p_subscription, p_incarnation (a member); p_lease_ms (renewed by this much; call again in a quarter of it)
-- out: a row a partition: partition, fence, resolved, floor, target, target_floor, "position", before (see read_subscription),
--     give_up: it is more than its share: write where it stands and give it to release_subscription. First a row with
--     epoch and alive alone; alive is false if it is no member any more: drop everything, and join with a new one
-- shares: even; of those that have most each keeps one more where it does not come out even. So a member that comes or
--     goes moves its own share only
-- who is gone: its incarnation has ended, its lease is over, or nobody holds its session lock
-- locks: the subscription's row (others' looks wait), then rows of incarnations, then rows of free partitions (those in
--     which somebody else's transaction still writes are left for the next look)
-- cost: a row a partition; an update of the incarnation's row, and of each partition taken
create or replace function @schema@.share_subscription(p_subscription int4, p_incarnation int4, p_lease_ms int8)
returns table (epoch uuid, alive bool, "partition" int4, fence int8, resolved text, floor int8, target text,
    target_floor int8, "position" int8, before bool, give_up bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_gone int4[];
    v_partitions int4;
    v_share int4;
    v_held int4;
    v_rebased int8;
begin
    alive := false;
    epoch := wh_epoch_token();
    perform from wh_subscription s where s.subscription = p_subscription for no key update;
    if found then
        alive := renew_lease(p_incarnation, p_lease_ms)
            and exists (select from wh_subscription_member m
                where m.subscription = p_subscription and m.incarnation = p_incarnation);
    end if;
    return next;
    if not alive then
        return;
    end if;

    select array_agg(m.incarnation) into v_gone
    from wh_subscription_member m
    left join wh_instance i on i.number = m.incarnation and i.state = 0
    where m.subscription = p_subscription and m.incarnation <> p_incarnation
        and (i.number is null or i.lease_until < clock_timestamp()
            or i.direct and pg_try_advisory_xact_lock(wh_lock_class(4), m.incarnation));
    if v_gone is not null then
        delete from wh_subscription_member m where m.subscription = p_subscription and m.incarnation = any (v_gone);
        -- Nobody else looks after one that owns nothing.
        update wh_instance i set state = 1 where i.number = any (v_gone) and i.state = 0 and i.owns is false;
    end if;

    select i.rebased_position, (select count(*) from wh_partition) into strict v_rebased, v_partitions
    from wh_installation i;
    select s.share, s.held into strict v_share, v_held
    from (
        select m.incarnation, m.held, v_partitions / (count(*) over ())::int4
            + case when row_number() over (order by m.held desc, m.incarnation)
                <= v_partitions % (count(*) over ())::int4 then 1 else 0 end as share
        from (
            select m.incarnation, (select count(*)::int4 from wh_subscription_partition p
                where p.subscription = p_subscription and p.owner = m.incarnation) as held
            from wh_subscription_member m where m.subscription = p_subscription
        ) m
    ) s
    where s.incarnation = p_incarnation;
    if v_held < v_share then
        update wh_subscription_partition p set owner = p_incarnation, fence = p.fence + 1, updated_at = clock_timestamp()
        from (
            select f.partition from wh_subscription_partition f
            where f.subscription = p_subscription
                and not exists (select from wh_subscription_member m
                    where m.subscription = p_subscription and m.incarnation = f.owner)
            order by f.partition
            limit v_share - v_held
            for no key update skip locked
        ) f
        where p.subscription = p_subscription and p.partition = f.partition;
        if found then
            perform pg_notify(wh_subscription_channel(), p_subscription::text);
        end if;
    end if;

    return query
    select null::uuid, null::bool, p.partition, p.fence, p.resolved::text, p.floor, p.target::text, p.target_floor, p.position,
        p.before_from < v_rebased, row_number() over (order by p.partition) > v_share
    from wh_subscription_partition p
    where p.subscription = p_subscription and p.owner = p_incarnation
    order by p.partition;
end
$$;
