-- wh_flush_key: the second half of the advisory lock that one shard's flushes take one after the other.
-- find_flush waits on it, and so sees a flush whose connection was lost and which was still committing.
-- in: incarnation int4, shard int4    out: key int4
-- locks: none    cost: one expression, inlined
create or replace function @schema@.wh_flush_key(incarnation int4, shard int4) returns int4
language sql immutable parallel safe strict
return ((incarnation::int8 << 10 | shard::int8) & 2147483647)::int4;
