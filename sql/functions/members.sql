-- members: the other incarnations, with what a taker has to watch, and how much there is to take.
-- in: p_incarnation
-- out: one row a member (alive, and it owns partitions or may): number, id, counter, expired (by the database's clock),
--     connected (somebody holds its session lock: only a hint, mark_dead tries it; true where it has none), owns
--     (whether it takes partitions), held (how many it has);
--     in every row free (partitions that nobody owns) and free_partitions (how many those are).
--     Without members one row of nulls beside them
-- locks: none    cost: the rows of wh_partition; with members the server's lock table, once
create or replace function @schema@.members(p_incarnation int4)
returns table (free_partitions int4, "number" int4, id uuid, counter int8, expired bool, connected bool, owns bool,
    held int4, free int4[])
language sql volatile
as $$
    select cardinality(f.free), i.number, i.id, i.counter, i.lease_until < clock_timestamp(),
        case
            when not i.direct then true
            when i.number is not null then i.number::oid in (
                select l.objid from pg_locks l
                where l.locktype = 'advisory' and l.classid = @schema@.wh_lock_class(4)::oid and l.objsubid = 2
                    and l.granted
                    and l.database = (select d.oid from pg_database d where d.datname = current_database()))
        end,
        coalesce(i.owns, i.held > 0), i.held, f.free
    from (
        select coalesce(array_agg(p.partition order by p.partition) filter (where p.owner is null), '{}') as free
        from @schema@.wh_partition p
    ) f
    left join (
        select i.*, coalesce(o.held, 0) as held
        from @schema@.wh_instance i
        left join (select p.owner, count(*)::int4 as held from @schema@.wh_partition p group by p.owner) o
            on o.owner = i.number
        where i.state = 0 and i.number <> p_incarnation and (i.owns or o.held > 0)
    ) i on true
    order by i.number
$$;
