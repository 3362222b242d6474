-- wh_read_undecided: a worker's reader: references of its partitions that are not resolved, from the log, by position.
-- It keeps no place: it begins where its partitions are resolved, and what is in hand or decided stands first.
-- in: p_incarnation (its fence is held); p_leaving (partitions of which nothing is to be handed out); p_fresh_max: how
--     many that may be handed out are enough; p_stream_rows_max: how many of one stream and destination count for that
-- out: read_xmax, running: the snapshot that was read (this transaction is among those running); begun_xmax,
--     begun_listed: what was resolved of all before; page_end: up to which position it was read (null: whole); any_log:
--     whether there was anything; then arrays with an element a reference, by position: xid, segment, lane, destination,
--     partition, stream_seq, version and state (0 to hand out, 1 in hand, 2 decided, 3 of a parked lane, 4 leaving)
-- locks: none    refused with 25006 on a standby: its snapshots do not list what runs
-- order: a call's positions lie together and a stream's ascend, and who sees a message sees those before it: the page
--     is cut by position, never by transaction
-- cost: some hundred log rows more than it needs, at most 65,536; while more than 2,048 are new they are walked by
--     position from the last known floor, of rows that were resolved as well
create or replace function @schema@.wh_read_undecided(
    p_incarnation int4, p_leaving int4[], p_fresh_max int4, p_stream_rows_max int4,
    out read_xmax int8, out running int8[], out begun_xmax int8, out begun_listed int8[], out page_end int8,
    out any_log bool, out xid int8[], out segment int2[], out lane uuid[], out destination text[],
    out "partition" int4[], out stream_seq int8[], out version int8[], out state int2[])
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_snapshot pg_snapshot;
    v_partition int4[];
    v_base pg_snapshot[];
    v_cursor pg_snapshot[];
    v_few bool;
    v_floor int8;
    v_after int8 := 0;
    v_portion int4 := 256;
    v_walked int4 := 0;
    v_rows int4;
    v_begun_xmax int8;
    v_begun_listed int8[];
    v_read_xmax int8;
    v_running int8[];
    v_position int8[];
    v_segment int2[];
    v_xid int8[];
    v_page record;
    v_fresh int4;
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: claims need the primary' using errcode = '25006';
    end if;
    -- The snapshot counts this transaction as over, if its id is among those that it sees through: it is not.
    v_snapshot := pg_current_snapshot();
    v_read_xmax := pg_snapshot_xmax(v_snapshot)::text::int8;
    v_running := array(select x::text::int8 from pg_snapshot_xip(v_snapshot) x)
        || pg_current_xact_id()::text::int8;

    select array_agg(r.partition), array_agg(r.base), array_agg(r.cursor) into v_partition, v_base, v_cursor
    from wh_resolved r where r.owner = p_incarnation;
    with known as (
        select distinct r.base::text as base, r.cursor::text as cursor from unnest(v_base, v_cursor) r(base, cursor)
    ), resolved as (
        select wh_snapshot_union(k.base::pg_snapshot, k.cursor::pg_snapshot) as set from known k
    ), edge as (
        select min(pg_snapshot_xmax(r.set)::text::int8) as xmax from resolved r
    )
    select e.xmax, array(
        select distinct x::text::int8 from resolved r, pg_snapshot_xip(r.set) x where x::text::int8 < e.xmax)
    into v_begun_xmax, v_begun_listed
    from edge e;
    v_begun_xmax := coalesce(v_begun_xmax, v_read_xmax);
    v_begun_listed := coalesce(v_begun_listed, '{}');

    v_few := not exists (
        select from wh_log l where l.xid >= v_begun_xmax and l.xid < v_read_xmax offset 2048);
    if not v_few then
        select coalesce(max(f.floor), 0) into v_floor
        from (select l.floor from wh_log l where l.xid < v_begun_xmax order by l.xid desc limit 64) f;
    end if;

    any_log := false;
    xid := '{}'; segment := '{}'; lane := '{}'; destination := '{}'; "partition" := '{}'; stream_seq := '{}';
    version := '{}'; state := '{}';
    loop
        select array_agg(k.position order by k.position), array_agg(k.segment order by k.position),
            array_agg(k.xid order by k.position), count(*)
        into v_position, v_segment, v_xid, v_rows
        from (
            select l.position, l.segment, l.xid
            from (
                select l.position, l.segment, l.xid
                from wh_log l
                where v_few and l.position > v_after and l.xid >= v_begun_xmax and l.xid < v_read_xmax
                    and not (l.xid = any (v_running))
                union all
                (select l.position, l.segment, l.xid
                from wh_log l
                where not v_few and l.position > greatest(v_after, v_floor)
                    and l.xid >= v_begun_xmax and l.xid < v_read_xmax and not (l.xid = any (v_running))
                order by l.position
                limit v_portion)
                union all
                select l.position, l.segment, l.xid
                from unnest(v_begun_listed) x
                cross join lateral (
                    select l.position, l.segment, l.xid
                    from wh_log l
                    where l.xid = x and l.position > v_after
                    order by l.position
                    limit v_portion
                ) l
                where not (x = any (v_running))
            ) l
            order by l.position
            limit v_portion
        ) k;
        exit when v_rows = 0;
        any_log := true;
        v_walked := v_walked + v_rows;
        v_after := v_position[v_rows];

        select coalesce(array_agg(f.xid order by f.log, f.turn), '{}') as xid,
            coalesce(array_agg(f.segment order by f.log, f.turn), '{}') as segment,
            coalesce(array_agg(f.lane_id order by f.log, f.turn), '{}') as lane,
            coalesce(array_agg(f.destination order by f.log, f.turn), '{}') as destination,
            coalesce(array_agg(f.partition order by f.log, f.turn), '{}') as partition,
            coalesce(array_agg(f.stream_seq order by f.log, f.turn), '{}') as stream_seq,
            coalesce(array_agg(f.version order by f.log, f.turn), '{}') as version,
            coalesce(array_agg(f.state order by f.log, f.turn), '{}') as state
        into v_page
        from (
            select k.xid, k.segment, r.lane_id, l.destination[r.destination] as destination, r.partition, r.stream_seq,
                r.version, k.turn as log, r.turn,
                (case
                    when h.decided then 2
                    when h.decided is not null then 1
                    when p.lane_id is not null then 3
                    when r.partition = any (p_leaving) then 4
                    else 0
                end)::int2 as state
            from unnest(v_position, v_segment, v_xid) with ordinality k(position, segment, xid, turn)
            join wh_log l on l.segment = k.segment and l.position = k.position
            cross join lateral (
                select generate_series(1, cardinality(l.partition)) as turn, unnest(l.partition) as partition,
                    unnest(l.destination_index) as destination, unnest(l.stream_seq) as stream_seq,
                    unnest(l.version) as version, unnest(l.lane_id) as lane_id
            ) r
            join unnest(v_partition, v_base, v_cursor) o(partition, base, cursor) on o.partition = r.partition
            left join wh_handed_out h
                on h.incarnation = p_incarnation and h.lane_id = r.lane_id
                and h.destination = l.destination[r.destination] and h.stream_seq = r.stream_seq and not h.beside
            left join wh_parked p on p.lane_id = r.lane_id and p.destination = l.destination[r.destination]
            -- Below are the words that owners are told by (wh_tell_lanes): what they are about stands beside the log.
            where r.stream_seq > 0
                and not pg_visible_in_snapshot(k.xid::text::xid8, o.base)
                and not pg_visible_in_snapshot(k.xid::text::xid8, o.cursor)
        ) f;
        xid := xid || v_page.xid;
        segment := segment || v_page.segment;
        lane := lane || v_page.lane;
        destination := destination || v_page.destination;
        "partition" := "partition" || v_page.partition;
        stream_seq := stream_seq || v_page.stream_seq;
        version := version || v_page.version;
        state := state || v_page.state;
        exit when v_rows < v_portion;

        select count(*) into v_fresh
        from (
            select row_number() over (partition by f.lane_id, f.destination) as place
            from unnest(lane, destination, state) f(lane_id, destination, state)
            where f.state = 0
        ) f
        where f.place <= p_stream_rows_max;
        if v_fresh >= greatest(p_fresh_max, 1) or v_walked >= 65536 then
            page_end := v_after;
            exit;
        end if;
        v_portion := least(v_portion * 2, 4096);
    end loop;
    read_xmax := v_read_xmax;
    running := v_running;
    begun_xmax := v_begun_xmax;
    begun_listed := v_begun_listed;
end
$$;
