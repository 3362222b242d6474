-- wh_lock_class: the first key of this schema's two-part advisory locks, one class a kind of lock.
-- in: kind int4: 0 lane of the inbox (key: wh_inbox_key; a session lock), 1 partition (key: its number),
--     2 stream (key: wh_stream_key), 3 fence of an incarnation (key: its number), 4 life of an incarnation (key: its
--     number; a session lock), 5 flushes' turn in a partition (key: its number), 6 maintenance (key: 0), registrations
--     of owners (key: 1), inspections (key: 2), days of the inbox (key: 3) and truncations of streams (key: 4),
--     7 flushes of a shard (key: wh_flush_key)
-- out: int4
-- Made of the schema's oid, so that two schemas of one database do not notice each other. Inlined and folded to a
-- constant: that is why it carries no search_path of its own.
-- locks: none    cost: none
create or replace function @schema@.wh_lock_class(kind int4) returns int4
language sql immutable strict parallel safe
as $$
    select ('@schema@'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.int8 * 8 + kind)::pg_catalog.bit(32)::pg_catalog.int4
$$;
