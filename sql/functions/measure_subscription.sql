-- measure_subscription: how far a subscription is behind, as it is written down (at most a second old).
-- in: p_name; p_events_max: where counting ends
-- out: events (committed, of its partitions, not read; of any type), oldest_age_ms (of the one of them that was stored
--     first; 0 if there is none), members, partitions_free; nulls if there is no such subscription
-- locks: none    cost: the events that are not read, up to p_events_max
create or replace function @schema@.measure_subscription(
    p_name text, p_events_max int4 default 1000000,
    out events int8, out oldest_age_ms int8, out members int4, out partitions_free int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_subscription int4;
    v_started int8;
    v_rebased int8;
    v_low int8;
    v_late int8[];
    v_now pg_snapshot := pg_current_snapshot();
    v_oldest timestamptz;
begin
    select s.subscription, s.started_at into v_subscription, v_started from wh_subscription s where s.name = p_name;
    if not found then
        return;
    end if;
    select i.rebased_position into strict v_rebased from wh_installation i;
    select count(*) into members from wh_subscription_member m where m.subscription = v_subscription;
    select count(*) filter (where p.owner is null),
        min(case when p.before_from < v_rebased then p.before_from else p.floor end)
    into partitions_free, v_low
    from wh_subscription_partition p where p.subscription = v_subscription;
    v_low := greatest(v_low, v_started);
    select array_agg(distinct x::text::int8) into v_late
    from wh_subscription_partition p
    cross join lateral pg_snapshot_xip(p.resolved) x
    where p.subscription = v_subscription and pg_visible_in_snapshot(x, v_now);
    select count(*), min(u.stored_at) into events, v_oldest
    from (
        select e.stored_at
        from (
            select e.position, e.xid, e.partition, e.stored_at from wh_event_store e where e.position > v_low
            union all
            select e.*
            from unnest(v_late) x
            cross join lateral (
                select e.position, e.xid, e.partition, e.stored_at
                from wh_event_store e where e.xid = x and e.position + 0 <= v_low and e.position + 0 > v_started
            ) e
        ) e
        join wh_subscription_partition p on p.subscription = v_subscription and p.partition = e.partition
        where case
            when e.position > v_rebased then not pg_visible_in_snapshot(e.xid::text::xid8, p.resolved)
                and (p.target is null or e.position > p.position
                    or not pg_visible_in_snapshot(e.xid::text::xid8, p.target))
            else p.before_from < v_rebased and e.position > p.before_from and (p.target is null or e.position > p.position)
                and not pg_visible_in_snapshot(e.xid::text::xid8, p.before_resolved)
                and (p.before_target is null or e.position > p.before_position
                    or not pg_visible_in_snapshot(e.xid::text::xid8, p.before_target))
        end
        limit p_events_max
    ) u;
    oldest_age_ms := coalesce(greatest(0, extract(epoch from clock_timestamp() - v_oldest) * 1000), 0)::int8;
end
$$;
