-- find_flush_1: find_flush as a program of schema version 1 calls it, which does not say how many messages the flush
-- has of each stream. Goes at the earliest with schema version 3.
-- in: as find_flush, without p_stream_rows    out: as find_flush; so of a flush whose log rows are truncated, and which
--     has streams, the numbers are never told (CL006: it is stored)
-- locks: as find_flush    cost: as find_flush
create or replace function @schema@.find_flush(
    p_incarnation int4, p_shard int2, p_flush int8, p_since int8, p_stream_id uuid[])
returns table (xid int8, epoch uuid, "position" int8, owned bool, last_seq int8[], last_version int8[])
language sql volatile
as $$
    select f.* from @schema@.find_flush(p_incarnation, p_shard, p_flush, p_since, p_stream_id,
        array_fill(2147483647, array[cardinality(p_stream_id)])) f
$$;
