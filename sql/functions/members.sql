-- members: other incarnations that own partitions, with what a taker has to watch, and how much there is to take.
-- in: p_incarnation
-- out: one row a member: number, id, counter, expired (by the database's clock), connected (somebody holds its session
--     lock: only a hint, mark_dead tries it); free_partitions in every row.
--     Without members one row of nulls beside free_partitions
-- locks: none    cost: the rows of wh_partition; with members the server's lock table, once
create or replace function @schema@.members(p_incarnation int4)
returns table (free_partitions int4, "number" int4, id uuid, counter int8, expired bool, connected bool)
language sql volatile
as $$
    select f.free_partitions, i.number, i.id, i.counter, i.lease_until < clock_timestamp(),
        case when i.number is not null then i.number::oid in (
            select l.objid from pg_locks l
            where l.locktype = 'advisory' and l.classid = @schema@.wh_lock_class(4)::oid and l.objsubid = 2 and l.granted
                and l.database = (select d.oid from pg_database d where d.datname = current_database()))
        end
    from (select count(*)::int4 as free_partitions from @schema@.wh_partition p where p.owner is null) f
    left join @schema@.wh_instance i
        on i.state = 0 and i.number <> p_incarnation
        and exists (select from @schema@.wh_partition p where p.owner = i.number)
    order by i.number
$$;
