-- deregister_instance: a clean end: what the shards' last cursors hold becomes the base, the partitions are free.
-- in: p_incarnation    out: whether it was alive
-- locks: its fence (exclusive, waiting for its shards' last writes); gives the session lock back
-- cost: the incarnation's partitions (wh_free_partitions), and the server's lock table, once
create or replace function @schema@.deregister_instance(p_incarnation int4) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_alive bool;
begin
    perform pg_advisory_xact_lock(wh_lock_class(3), p_incarnation);
    update wh_instance i set state = 2 where i.number = p_incarnation and i.state = 0;
    v_alive := found;
    if v_alive then
        perform wh_free_partitions(p_incarnation);
        perform pg_notify(wh_channel(), 'members');
    end if;
    perform pg_advisory_unlock(l.classid::int4, l.objid::int4)
    from pg_locks l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 2
        and l.classid::int8 = wh_lock_class(4) and l.objid::int8 = p_incarnation;
    return v_alive;
end
$$;
