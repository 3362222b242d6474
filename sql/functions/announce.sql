-- announce: says that messages were stored that this incarnation does not publish itself; their owners look at once
-- instead of at their next poll.
-- in: p_incarnation: who says so, and need not be told; null: a caller without one, after its transaction
-- out: nothing    locks: none
-- cost: one notification for all who listen
-- why a call of its own: NOTIFY makes commits wait for each other. At most one in 5 to 50 ms costs nothing; one in
--     every storing transaction takes two thirds of the throughput
create or replace function @schema@.announce(p_incarnation int4 default null) returns void
language sql volatile
as $$
    select pg_notify(@schema@.wh_channel(), 'work:' || coalesce(p_incarnation::text, ''))
$$;
