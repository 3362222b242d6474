-- wh_lock_class: the first half of an advisory lock of ours. Two schemas of one database never meet.
-- in: kind int4    out: class int4
--   1 partition (key: partition)          2 stream (key: wh_stream_key)     3 fence of an incarnation (key: its number)
--   4 an incarnation is alive (its number) 5 migration (0)                   6 maintenance (0)
--   7 flush of a shard (key: wh_flush_key)
-- order of locks in every transaction: 3 shared, 7, 1 ascending, 2 ascending; then reads, in a LATER statement; then writes
-- cost: folded to a constant when a plan is made (the schema's oid is a literal)
create or replace function @schema@.wh_lock_class(kind int4) returns int4
language sql immutable parallel safe
return ((('@schema@'::regnamespace::oid::int8 << 3) | kind) & 2147483647)::int4;
