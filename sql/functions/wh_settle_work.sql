-- wh_settle_work: outcomes of a worker that speaks SQL, beside the log and in the dead letters. What settle does, and
-- what a shard otherwise remembers: that attempts are the head's only.
-- in: p_incarnation (its fence is held exclusively by this transaction); the arrays of settle, each may be left out
-- out: nothing    errors: if it is not the owner (which its fence rules out)
-- locks: as settle    cost: as settle, and an update of each lane whose head has left
create or replace function @schema@.wh_settle_work(
    p_incarnation int4,
    p_park_lane uuid[] default '{}', p_park_destination text[] default '{}', p_park_partition int4[] default '{}',
    p_park_seq int8[] default '{}', p_park_attempts int4[] default '{}', p_park_reason int2[] default '{}',
    p_park_error text[] default '{}', p_park_error_cut bool[] default '{}', p_park_due_in_ms int8[] default '{}',
    p_spill_lane uuid[] default '{}', p_spill_destination text[] default '{}', p_spill_partition int4[] default '{}',
    p_spill_seq int8[] default '{}', p_spill_version int8[] default '{}',
    p_drained_lane uuid[] default '{}', p_drained_destination text[] default '{}',
    p_drained_partition int4[] default '{}', p_drained_seq int8[] default '{}',
    p_dead_lane uuid[] default '{}', p_dead_destination text[] default '{}', p_dead_partition int4[] default '{}',
    p_dead_seq int8[] default '{}', p_dead_version int8[] default '{}', p_dead_attempts int4[] default '{}',
    p_dead_reason int2[] default '{}', p_dead_error text[] default '{}', p_dead_error_cut bool[] default '{}')
returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_unpark_lane uuid[];
    v_unpark_destination text[];
    v_unpark_partition int4[];
begin
    -- Only a cursor, and nothing else, makes a transaction asynchronous: never this one, which is the caller's.
    if cardinality(p_park_lane) + cardinality(p_spill_lane) + cardinality(p_drained_lane) + cardinality(p_dead_lane) = 0
    then
        return;
    end if;
    -- Not a lane that waits for an operator, or is about to: its row says so.
    select coalesce(array_agg(u.lane_id), '{}'), coalesce(array_agg(u.destination), '{}'),
        coalesce(array_agg(u.partition), '{}')
    into v_unpark_lane, v_unpark_destination, v_unpark_partition
    from unnest(p_drained_lane || p_dead_lane, p_drained_destination || p_dead_destination,
        p_drained_partition || p_dead_partition) u(lane_id, destination, partition)
    where not exists (
            select from wh_parked k where k.lane_id = u.lane_id and k.destination = u.destination and k.held)
        and not exists (
            select from unnest(p_park_lane, p_park_destination, p_park_due_in_ms) k(lane_id, destination, due_in_ms)
            where k.lane_id = u.lane_id and k.destination = u.destination and k.due_in_ms >= 3155760000000);
    if (select s.fenced from settle(p_incarnation, 0::int2, 0, null, null,
        p_park_lane, p_park_destination, p_park_partition, p_park_seq, p_park_attempts, p_park_reason, p_park_error,
        p_park_error_cut, p_park_due_in_ms, p_spill_lane, p_spill_destination, p_spill_partition, p_spill_seq,
        p_spill_version, p_drained_lane, p_drained_destination, p_drained_partition, p_drained_seq, p_dead_lane,
        p_dead_destination, p_dead_partition, p_dead_seq, p_dead_version, p_dead_attempts, p_dead_reason,
        p_dead_error, p_dead_error_cut, v_unpark_lane, v_unpark_destination, v_unpark_partition) s)
    then
        raise exception 'incarnation % does not own what it decides', p_incarnation;
    end if;
    -- What is behind a head that has left begins anew.
    update wh_parked k
    set stream_seq = n.stream_seq, due = clock_timestamp(), attempts = 0, reason = 0, error = '', error_cut = false
    from (
        select d.lane_id, d.destination, d.stream_seq as left_seq, min(r.stream_seq) as stream_seq
        from unnest(p_drained_lane || p_dead_lane, p_drained_destination || p_dead_destination, p_drained_seq || p_dead_seq)
            d(lane_id, destination, stream_seq)
        join wh_parked_reference r on r.lane_id = d.lane_id and r.destination = d.destination
        group by d.lane_id, d.destination, d.stream_seq
    ) n
    where k.lane_id = n.lane_id and k.destination = n.destination and k.stream_seq = n.left_seq
        and not k.held;
end
$$;
