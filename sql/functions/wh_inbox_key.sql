-- wh_inbox_key: the second key of an inbox lane's advisory lock (class: wh_lock_class(0)), a session lock.
-- in: consumer int2, lane_id uuid    out: int4    locks: none    cost: one expression, inlined
-- Two lanes that share a key cannot be handled by two sessions at a time, nothing else.
create or replace function @schema@.wh_inbox_key(consumer int2, lane_id uuid) returns int4
language sql immutable strict parallel safe
as $$
    select pg_catalog.uuid_hash(lane_id) # pg_catalog.hashint2(consumer)
$$;
