-- wh_sentinel: what waits longer than it should.
-- in: p_unpublished_ms, p_stuck_ms: what is too long
-- out: unpublished: messages (one for each destination) that were stored longer ago, and are neither published nor beside
--         the log nor dead, and the age of the oldest; overdue: scheduled messages that were due longer ago
--     stuck: lanes parked for longer, and the age of the longest; held: those of all lanes that wait for an operator
-- locks: none
-- cost: bounded: at most 1,000 log rows from the oldest that is not resolved (what lies behind them is not counted), one
--     probe for the age of each; 1,000 scheduled messages; one pass over the parked lanes
create or replace function @schema@.wh_sentinel(
    p_unpublished_ms int8, p_stuck_ms int8, out unpublished int4, out unpublished_age_ms int8, out overdue int4,
    out stuck int4, out stuck_age_ms int8, out held int4)
language plpgsql stable
set search_path = @schema@, pg_temp
set jit = off
as $$
declare
    v_now constant timestamptz := clock_timestamp();
    v_low int8;
begin
    -- As texts, because snapshots cannot be compared: there are a few, and many partitions.
    select min(greatest(pg_snapshot_xmin(s.base::pg_snapshot)::text::int8, pg_snapshot_xmin(s.cursor::pg_snapshot)::text::int8))
    into v_low
    from (select distinct r.base::text as base, r.cursor::text as cursor from wh_resolved r) s;
    with oldest as materialized (
        select l.segment, l.position, l.xid, l.partition, l.stream_seq, l.version, l.lane_id
        from wh_log l
        where l.xid >= v_low
        order by l.xid, l.position
        limit 1000
    ), resolved as materialized (
        select r.partition, r.base, r.cursor from wh_resolved r
    ), open as (
        select distinct on (o.segment, o.position) o.segment, u.lane_id, u.stream_seq, u.version,
            count(*) over (partition by o.segment, o.position) as size
        from oldest o
        cross join lateral unnest(o.partition, o.stream_seq, o.version, o.lane_id)
            u(partition, stream_seq, version, lane_id)
        join resolved r on r.partition = u.partition
        where u.stream_seq > 0
            and not pg_visible_in_snapshot(o.xid::text::xid8, r.base)
            and not pg_visible_in_snapshot(o.xid::text::xid8, r.cursor)
        order by o.segment, o.position, u.stream_seq
    ), aged as (
        select o.size, v_now - coalesce(
            (select e.stored_at from wh_event_store e where e.stream_id = o.lane_id and e.version = nullif(o.version, 0)),
            (select b.stored_at from wh_outbox b where b.segment = o.segment and b.lane_id = o.lane_id
                and b.stream_seq = o.stream_seq and o.version = 0)) as age
        from open o
    )
    select coalesce(sum(a.size), 0)::int4, coalesce(max(extract(epoch from a.age) * 1000), 0)::int8
    into unpublished, unpublished_age_ms
    from aged a
    where a.age > p_unpublished_ms * interval '1 millisecond';
    select count(*) into overdue
    from (
        select from wh_scheduled s where s.due < v_now - p_unpublished_ms * interval '1 millisecond' limit 1000
    ) s;
    select count(*) filter (where k.age > p_stuck_ms * interval '1 millisecond'),
        coalesce(max(extract(epoch from k.age) * 1000) filter (where k.age > p_stuck_ms * interval '1 millisecond'), 0),
        count(*) filter (where k.held)
    into stuck, stuck_age_ms, held
    from (select v_now - k.parked_at as age, k.held from wh_parked k) k;
end
$$;
