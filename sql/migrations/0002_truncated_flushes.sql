-- Flushes whose log rows a rotation has truncated.
--
-- A shard whose connection was lost at a commit asks for the flush, however late. Nothing in the log need be there any
-- more by then: what is published is truncated, and a flush without destinations has nothing to publish. A shard has
-- one flush under way at a time, so its newest one of a segment is the only one that it can still ask for.
create table @schema@.wh_flush_truncated (
    flush_number int8 not null,
    xid int8 not null,
    position int8 not null,
    incarnation int4 not null,
    shard int2 not null,
    owned bool not null,
    primary key (incarnation, shard)
);

-- How far the log of a segment that is being emptied has been looked through for them.
alter table @schema@.wh_rotation
    add column noted_to int8 not null default 0,
    add column is_noted bool not null default false;

-- Their arguments or answers have changed: they are made anew.
do $$
declare
    v_function regprocedure;
begin
    for v_function in
        select p.oid::regprocedure from pg_catalog.pg_proc p
        where p.pronamespace = '@schema@'::regnamespace
            and p.proname in ('claim_work', 'find_flush', 'perform_maintenance', 'store_shard_messages')
    loop
        execute format('drop function %s', v_function);
    end loop;
end
$$;
