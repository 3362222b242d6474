-- hold_instance: takes an incarnation's session lock again, on a new connection.
-- in: p_incarnation    out: whether the lock is held; false while the server has not seen the old connection end
-- locks: "alive" of the incarnation, for the session, by trying    cost: none
create or replace function @schema@.hold_instance(p_incarnation int4) returns bool
language sql volatile
as $$
    select pg_try_advisory_lock(@schema@.wh_lock_class(4), p_incarnation)
$$;
