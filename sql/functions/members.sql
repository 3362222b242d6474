-- members: other incarnations that own partitions, with what a taker has to watch, and how much there is to take.
-- in: p_incarnation
-- out: one row a member: number, id, counter, expired (by the database's clock); free_partitions in every row.
--     Without members one row of nulls beside free_partitions
-- locks: none    cost: the rows of wh_partition
create or replace function @schema@.members(p_incarnation int4)
returns table (free_partitions int4, "number" int4, id uuid, counter int8, expired bool)
language sql volatile
as $$
    select f.free_partitions, i.number, i.id, i.counter, i.lease_until < clock_timestamp()
    from (select count(*)::int4 as free_partitions from @schema@.wh_partition p where p.owner is null) f
    left join @schema@.wh_instance i
        on i.state = 0 and i.number <> p_incarnation
        and exists (select from @schema@.wh_partition p where p.owner = i.number)
    order by i.number
$$;
