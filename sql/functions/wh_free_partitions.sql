-- wh_free_partitions: ends an incarnation's ownership: what its shards had resolved becomes the base of each
-- partition, the fences rise, and nobody owns them.
-- in: p_incarnation    out: how many    locks: the caller holds the incarnation's fence exclusively
-- cost: an update of each of its partitions, and its latest cursors
create or replace function @schema@.wh_free_partitions(p_incarnation int4) returns int4
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_count int4;
begin
    update wh_partition p
    set base = wh_snapshot_union(r.base, r.cursor), owner = null, fence = p.fence + 1
    from wh_resolved r
    where r.partition = p.partition and p.owner = p_incarnation;
    get diagnostics v_count = row_count;
    return v_count;
end
$$;
