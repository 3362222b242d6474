-- wh_stream_key: the second key of a stream's advisory lock (class: wh_lock_class(2)).
-- in: stream_id uuid    out: int4    locks: none    cost: one expression, inlined
-- A server hash function is right here and only here: the value lives no longer than a lock. Two streams that share
-- a key wait for each other, nothing else. Locks are taken by ascending key, without doubles. Inlined.
create or replace function @schema@.wh_stream_key(stream_id uuid) returns int4
language sql immutable strict parallel safe
as $$
    select pg_catalog.uuid_hash(stream_id)
$$;
