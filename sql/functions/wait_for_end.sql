-- wait_for_end: waits until an incarnation's connection has ended.
-- in: p_incarnation    out: true    fails with 55P03 after the connection's lock_timeout
-- locks: "alive" of the incarnation (shared, until the statement ends), waiting. While it waits the statement holds a
--     snapshot, and so holds up vacuum: keep lock_timeout at some seconds and call it again
-- cost: a connection that waits
create or replace function @schema@.wait_for_end(p_incarnation int4) returns bool
language sql volatile
as $$
    select pg_advisory_xact_lock_shared(@schema@.wh_lock_class(4), p_incarnation) is not null
$$;
