-- release_partitions: hands partitions over: what is resolved of each becomes its base, its fence rises, and nobody
-- owns it. The shard that held them publishes nothing of them any more, and has written all its outcomes.
-- in: p_incarnation; p_epoch: the life of the server that p_resolved stems from; p_partitions (those that it does not
--     own are passed over); p_resolved: what is resolved of each, exactly (null, or of another life of the server: as
--     far as the last cursor says; whatever was published since is published again)
-- out: ownership: the incarnation's set from now on; null if it is not alive
-- locks: its fence (exclusive: waits for flushes and outcomes under way, which then were written before anybody can
--     take the partitions, or find another ownership), its own row, rows of the partitions
-- cost: an update of each partition
create or replace function @schema@.release_partitions(
    p_incarnation int4, p_epoch uuid, p_partitions int4[], p_resolved pg_snapshot[], out ownership int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    perform pg_advisory_xact_lock(wh_lock_class(3), p_incarnation);
    update wh_instance i set ownership = i.ownership + 1
    where i.number = p_incarnation and i.state = 0
    returning i.ownership into ownership;
    if not found then
        return;
    end if;
    update wh_partition p
    set owner = null, fence = p.fence + 1,
        base = case
            when u.resolved is not null and p_epoch = (select e.token from wh_epoch e)
                then wh_snapshot_union(wh_snapshot_union(r.base, r.cursor), u.resolved)
            else wh_snapshot_union(r.base, r.cursor)
        end
    from unnest(p_partitions, p_resolved) u("partition", resolved)
    join wh_resolved r on r.partition = u.partition
    where p.partition = u.partition and p.owner = p_incarnation;
    if found then
        perform pg_notify(wh_channel(), 'members');
    end if;
end
$$;
