-- mark_dead: ends another incarnation and frees its partitions, in one transaction.
-- in: p_incarnation; p_counter: the heartbeat that the caller has seen stand still for a lease; p_early: its session
--     lock is enough, if it has one (then the counter is not asked)
-- out: whether it was done
-- locks: with p_early "alive" of the incarnation, by trying; its fence (exclusive, waiting for what it is writing).
--     What it has written is read in later statements; what it tries to write afterwards is refused
-- cost: one row; if it was done, the incarnation's partitions (wh_free_partitions)
create or replace function @schema@.mark_dead(p_incarnation int4, p_counter int8, p_early bool) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    if p_early and not pg_try_advisory_xact_lock(wh_lock_class(4), p_incarnation) then
        return false;
    end if;
    perform pg_advisory_xact_lock(wh_lock_class(3), p_incarnation);
    update wh_instance i
    set state = 1
    where i.number = p_incarnation and i.state = 0
        and (p_early and i.direct or i.counter = p_counter and i.lease_until < clock_timestamp());
    if not found then
        return false;
    end if;
    perform wh_free_partitions(p_incarnation);
    perform pg_notify(wh_channel(), 'members');
    return true;
end
$$;
