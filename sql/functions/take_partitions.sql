-- take_partitions: takes partitions that nobody owns, and answers all that the incarnation holds.
-- in: p_incarnation; p_partitions: which to take (null: every one that is free)
-- out: ownership, partition[] (ascending), fence[]; no row if the incarnation is not alive or its lease is past
-- locks: its own row, then the rows of free partitions (those that somebody else is taking are left to him)
-- cost: the rows of wh_partition, and an update of each that is taken
create or replace function @schema@.take_partitions(p_incarnation int4, p_partitions int4[] default null)
returns table (ownership int8, "partition" int4[], fence int8[])
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_ownership int8;
begin
    select i.ownership into v_ownership
    from wh_instance i
    where i.number = p_incarnation and i.state = 0 and i.lease_until > clock_timestamp()
    for update;
    if not found then
        return;
    end if;
    update wh_partition p
    set owner = p_incarnation, fence = p.fence + 1, ownership = v_ownership + 1
    from (
        select f.partition from wh_partition f
        where f.owner is null and (p_partitions is null or f.partition = any (p_partitions))
        order by f.partition
        for update skip locked
    ) f
    where p.partition = f.partition;
    if found then
        v_ownership := v_ownership + 1;
        update wh_instance i set ownership = v_ownership where i.number = p_incarnation;
    end if;
    return query
    select v_ownership, coalesce(array_agg(p.partition order by p.partition), '{}'),
        coalesce(array_agg(p.fence order by p.partition), '{}')
    from wh_partition p
    where p.owner = p_incarnation;
end
$$;
