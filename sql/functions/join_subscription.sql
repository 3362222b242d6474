-- join_subscription: an incarnation runs a subscription from now on. The first one ever to join makes it.
-- in: p_name (1 to 255 bytes); p_incarnation (of register_instance, best one of its own that owns nothing, so that it is
--     followed when its connection ends);
--     p_from: only for one that is made now: 0 from the beginning, a position: what lies above it, null: from now on
--     (what is not committed yet included)
-- out: subscription (its number), created
-- locks: its row in wh_subscription (shared)    cost: two rows; when it is made, one a partition
create or replace function @schema@.join_subscription(
    p_name text, p_incarnation int4, p_from int8 default 0, out subscription int4, out created bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_edge pg_snapshot;
    v_floor int8;
    v_rebased int8;
begin
    if p_from < 0 then
        raise exception 'a position is 0 (the beginning) or more, not %', p_from using errcode = '22023';
    end if;
    select s.subscription into subscription from wh_subscription s where s.name = p_name for key share;
    created := false;
    if not found then
        -- Before this transaction has an id.
        select e.edge, greatest(e.floor, 0) into v_edge, v_floor from wh_read_edge() e;
        insert into wh_subscription as s (name, started_at) values (p_name, coalesce(p_from, 0))
        on conflict (name) do nothing
        returning s.subscription into subscription;
        created := found;
    end if;
    if created then
        select i.rebased_position into strict v_rebased from wh_installation i;
        insert into wh_subscription_partition (subscription, partition, resolved, floor, before_from)
        select subscription, p.partition, case when p_from is null then v_edge else '1:1:' end,
            case when p_from is null then v_floor else greatest(p_from, v_rebased) end,
            case when p_from is null then v_rebased else p_from end
        from wh_partition p;
    elsif subscription is null then
        select s.subscription into strict subscription from wh_subscription s where s.name = p_name for key share;
    end if;
    insert into wh_subscription_member (subscription, incarnation) values (subscription, p_incarnation)
    on conflict do nothing;
    perform pg_notify(wh_subscription_channel(), subscription::text);
end
$$;
