-- members: other incarnations that own partitions, with what a taker has to watch.
-- in: p_incarnation    out: number, id, counter, expired (by the database's clock)    locks: none
create or replace function @schema@.members(p_incarnation int4)
returns table ("number" int4, id uuid, counter int8, expired bool)
language sql volatile
as $$
    select i.number, i.id, i.counter, i.lease_until < clock_timestamp()
    from @schema@.wh_instance i
    where i.state = 0 and i.number <> p_incarnation
        and exists (select from @schema@.wh_partition p where p.owner = i.number)
    order by i.number
$$;
