-- keep_resolved: what is resolved of partitions that stay with their owner while its set changes.
-- in: p_incarnation; p_epoch: the life of the server that it stems from; p_partitions, p_resolved: what is resolved of
--     each, exactly (of those that the incarnation does not own, and in another life, nothing is written)
-- why: a shard begins to read again where all of its partitions, the new ones among them, are resolved. Its cursors
--     say no more than that until it has caught up; after a crash meanwhile this is what is known.
-- locks: fence of the incarnation (shared); owners are read in a later statement; rows of the partitions
-- out: nothing    cost: an update of each partition
create or replace function @schema@.keep_resolved(
    p_incarnation int4, p_epoch uuid, p_partitions int4[], p_resolved pg_snapshot[]) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    perform pg_advisory_xact_lock_shared(wh_lock_class(3), p_incarnation);
    update wh_partition p
    set base = wh_snapshot_union(p.base, u.resolved)
    from unnest(p_partitions, p_resolved) u("partition", resolved)
    where p.partition = u.partition and p.owner = p_incarnation
        and p_epoch = (select e.token from wh_epoch e);
end
$$;
