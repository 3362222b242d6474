-- release_lanes: lets lanes go on that are held behind a dead letter, which stays where it is.
-- in: p_lanes, p_destinations (one a lane, at most 4,096)    out: how many were held
-- takes hold, errors: as retry_dead_letters
-- locks: fences of the owners (exclusive, see wh_lock_owners); rows of wh_parked    cost: a probe a lane
create or replace function @schema@.release_lanes(p_lanes uuid[], p_destinations text[]) returns int4
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_lanes uuid[];
    v_destinations text[];
    v_partitions int4[];
    v_stopped int4[];
begin
    perform wh_require('length of p_lanes', coalesce(cardinality(p_lanes), 0), 0, 4096);
    v_stopped := array(
        select distinct k.partition
        from unnest(p_lanes, p_destinations) l(lane_id, destination)
        join wh_parked k on k.lane_id = l.lane_id and k.destination = l.destination and k.held);
    perform wh_lock_owners(v_stopped);
    -- A later statement than the fences. A lane that began to be held meanwhile may be of a partition without: it stays.
    with freed as (
        update wh_parked k
        set held = false, due = clock_timestamp(), attempts = 0
        from (select distinct l.* from unnest(p_lanes, p_destinations) l(lane_id, destination)) l
        where k.lane_id = l.lane_id and k.destination = l.destination and k.held
            and k.partition = any (v_stopped)
        returning k.lane_id, k.destination, k.partition
    )
    select coalesce(array_agg(f.lane_id), '{}'), array_agg(f.destination), array_agg(f.partition)
    into v_lanes, v_destinations, v_partitions
    from freed f;
    if cardinality(v_lanes) > 0 then
        perform wh_tell_lanes(v_lanes, v_destinations, v_partitions, array_fill(-1::int8, array[cardinality(v_lanes)]));
    end if;
    return cardinality(v_lanes);
end
$$;
