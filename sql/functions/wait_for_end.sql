-- wait_for_end: waits until an incarnation's connection has ended.
-- in: p_incarnation    out: true; null if it has no direct connection, and so no lock that could be waited for.
--     Fails with 55P03 after the connection's lock_timeout
-- locks: "alive" of the incarnation (shared, until the statement ends), waiting. While it waits the statement holds a
--     snapshot, and so holds up vacuum: keep lock_timeout at some seconds and call it again
-- cost: a connection that waits
create or replace function @schema@.wait_for_end(p_incarnation int4) returns bool
language sql volatile
as $$
    select case
        when coalesce((select i.direct from @schema@.wh_instance i where i.number = p_incarnation), true)
        then pg_advisory_xact_lock_shared(@schema@.wh_lock_class(4), p_incarnation) is not null
    end
$$;
