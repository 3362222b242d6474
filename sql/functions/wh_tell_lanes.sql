-- wh_tell_lanes: says to the owners of lanes that something was put beside the log for them, or that they go on, by log
-- rows: nothing else is sure to be read by whoever owns them, now or after a take-over, exactly when it is visible.
-- in: p_lanes, p_destinations, p_partitions (not empty, at most 4,096), p_numbers: 0: look beside the log for this lane;
--     -1: the lane is held no more. No message has such a number: programs that do not know it pass it over, and find
--     what stands beside the log when they next read anew
-- out: nothing
-- locks: none of its own; called in a later statement than those it relies on
-- cost: a log row for each 180 lanes, and a notification (so the transaction cannot be prepared)
create or replace function @schema@.wh_tell_lanes(
    p_lanes uuid[], p_destinations text[], p_partitions int4[], p_numbers int8[]) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_draw record;
    v_segment int2;
begin
    select d.floor, d.xid, d.position into v_draw from wh_draw_position() d;
    select s.current into strict v_segment from wh_segment s;
    with named as (
        select l.*, (l.turn - 1) / 180 as log_row,
            dense_rank() over (partition by (l.turn - 1) / 180 order by l.destination)::int2 as name
        from unnest(p_lanes, p_destinations, p_partitions, p_numbers) with ordinality
            l(lane_id, destination, partition, number, turn)
    )
    insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version, lane_id,
        destination)
    select v_draw.position + n.log_row, v_draw.xid, v_draw.floor, v_segment, false, array_agg(n.partition order by n.turn),
        array_agg(n.name order by n.turn), array_agg(n.number order by n.turn), array_agg(0::int8 order by n.turn),
        array_agg(n.lane_id order by n.turn), array_agg(distinct n.destination order by n.destination)
    from named n
    group by n.log_row;
    perform announce(null);
end
$$;
