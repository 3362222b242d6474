-- load_shard: where a shard starts for partitions it has taken.
-- in: p_incarnation, p_partitions (those of one shard)
-- out: one row a partition (base and cursor: together what is resolved), then one row a parked lane
-- locks: none. Called in a statement of its own after the take-over committed; being stable it reads the cursors and
--     the parked rows in that statement's one snapshot
-- fence: a partition that the incarnation does not own has no row
-- cost: a probe a partition, and the parked lanes
create or replace function @schema@.load_shard(p_incarnation int4, p_partitions int4[])
returns table (
    partition int4, base text, cursor text, lane_id uuid, destination text, attempts int4, due_in_ms int8)
language sql stable
as $$
    select r.partition, r.base::text, r.cursor::text, null::uuid, null::text, null::int4, null::int8
    from @schema@.wh_resolved r
    where r.owner = p_incarnation and r.partition = any (p_partitions)
    union all
    select k.partition, null, null, k.lane_id, k.destination, k.attempts,
        ceil(extract(epoch from k.due - clock_timestamp()) * 1000)::int8
    from @schema@.wh_parked k
    where k.partition = any (p_partitions)
$$;
