-- Several incarnations share the partitions.
--
-- Who only stores is no member; who has no direct connection holds no session lock, so nothing can be told from that.
-- A program of the version before does not say whether it owns (null): it is a member while it holds partitions.
alter table @schema@.wh_instance
    add column owns bool,
    add column direct bool not null default true;

-- Each gets arguments with defaults, or further columns in its answer: what an older program calls is still there.
drop function if exists @schema@.register_instance(uuid, text, text, int8, int4);
drop function if exists @schema@.take_partitions(int4);
drop function if exists @schema@.members(int4);
