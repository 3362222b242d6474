-- read_feed: a page of the feed of all events, or those of some types. Who reads keeps the place: nothing is stored.
--
--     select * from corelane.read_feed(p_prefixes => '{orders.}');                     -- the last row has the place …
--     select * from corelane.read_feed('{"feed": 1, …}', p_prefixes => '{orders.}');   -- … for the next page
--
-- A place is what has been read whole (`read`, a set of transactions) and, of a snapshot that is being read (`target`),
-- the position up to which it has been. So nothing waits for a transaction that is open, and none that commits later is
-- skipped: see read_subscription, which reads the same way for members that share the work.
-- in: p_place (begin_feed's, or the one before; null: from the beginning); p_types (names), p_prefixes (beginnings of
--     names; with both, either): which events (null: all; the same for all pages of a place); p_rows_max (1 to 10,000),
--     p_bytes_max (payloads and metadata; one event at least); p_prove_ms (see below)
-- out: the events by position; then a row with the place behind them, and whole: there was nothing more when it was read.
--     A page can be empty and not whole: ask again. Along a stream positions grow; across streams a later page may hold
--     lower ones
-- a place after a crash of the server: ids that it counts as read may be given again. So it holds, beside where it is
--     (`at`), the last one that this cannot befall (`proved`), and goes on from there in another life of the server:
--     events read since come again. A place is proved by the page's own commit, when the last one is p_prove_ms old
-- a place after a rebase (restored, copied): goes on; where several lie between, what the ones before the last had left
--     comes again. After a restore to an earlier time, or a failover that lost transactions, it may lie ahead
-- errors: 40001 if events of the page are erased or truncated while it is read: ask again; CL022 a place that is none; CL023 one that lies ahead of this server (as far as that can be told): begin
--     behind a position; 22023 a parameter out of its range; 25006 on a standby; 25001 unless READ COMMITTED
-- locks: none. In a transaction of its own: a place of one that rolls back is none
-- cost: see wh_find_events; events of all types count. A look that finds nothing new reads neither
create or replace function @schema@.read_feed(
    p_place text default null, p_types text[] default null, p_prefixes text[] default null, p_rows_max int4 default 500,
    p_bytes_max int8 default 4194304, p_prove_ms int4 default 1000)
returns table (
    stream_id uuid, version int8, stream_seq int8, message_id uuid, correlation_id uuid, causation_id uuid,
    trace_id uuid, span_id int8, trace_flags int2, "partition" int4, type_name text, content_type text,
    metadata bytea, payload bytea, stored_at timestamptz, "position" int8, place text, whole bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_place jsonb;
    v_at wh_feed_place;
    v_before wh_feed_place;
    v_rebased int8;
    v_read_xmax int8;
    v_read_listed int8[];
    v_xmax int8;
    v_listed int8[];
    v_before_xmax int8;
    v_before_listed int8[];
    v_before_target_xmax int8;
    v_before_target_listed int8[];
    v_edge record;
    v_late int8[];
    v_low int8;
    v_end int8;
    v_is_before bool;
    v_scanned int8;
    v_rows tid[];
    v_found int8;
    v_last int8;
    v_returned int8;
    v_whole bool;
    v_now numeric := extract(epoch from clock_timestamp());
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: the feed needs the primary' using errcode = '25006';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'the feed is read at READ COMMITTED' using errcode = '25001';
    end if;
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    perform wh_require('p_bytes_max', p_bytes_max, 1, 1073741824);
    perform wh_require('p_prove_ms', p_prove_ms, 0, 86400000);
    v_place := wh_open_place(coalesce(p_place, begin_feed(0)));
    v_at := jsonb_populate_record(null::wh_feed_place, v_place -> 'at');
    v_before := v_at;
    v_rebased := (v_place ->> 'rebased')::int8;
    v_is_before := v_at.before_from < v_rebased;

    if v_at.target is null then
        v_at.position := 0;
        v_at.ceiling := null;
        select e.edge, e.floor into v_edge from wh_read_edge() e;
        if v_at.quiet and v_edge.floor = v_at.floor and not exists (
            select from pg_snapshot_xip(v_at.read) x where pg_visible_in_snapshot(x, v_edge.edge))
        then
            return query select null::uuid, null::int8, null::int8, null::uuid, null::uuid, null::uuid, null::uuid,
                null::int8, null::int2, null::int4, null::text, null::text, null::bytea, null::bytea,
                null::timestamptz, null::int8, v_place::text, true;
            return;
        end if;
        v_at.target := v_edge.edge;
        v_at.target_floor := greatest(v_edge.floor, v_at.floor);
    end if;
    if v_at.ceiling is null then
        -- Later than the snapshot: whoever is in it had drawn its positions.
        v_at.ceiling := coalesce(pg_sequence_last_value('wh_position'), 0) + 4095;
    end if;
    v_xmax := pg_snapshot_xmax(v_at.target)::text::int8;
    v_listed := array(select x::text::int8 from pg_snapshot_xip(v_at.target) x);
    v_read_xmax := pg_snapshot_xmax(v_at.read)::text::int8;
    v_read_listed := array(select x::text::int8 from pg_snapshot_xip(v_at.read) x);
    if v_is_before then
        v_before_xmax := pg_snapshot_xmax(v_at.before_read)::text::int8;
        v_before_listed := array(select x::text::int8 from pg_snapshot_xip(v_at.before_read) x);
        v_before_target_xmax := pg_snapshot_xmax(v_at.before_target)::text::int8;
        v_before_target_listed := array(select x::text::int8 from pg_snapshot_xip(v_at.before_target) x);
    end if;

    v_low := greatest(v_at.position, v_at.started,
        case when v_is_before then 0 else greatest(v_at.floor, v_rebased) end);
    -- Listed as running where the place stands, and in the target: what they wrote may lie below.
    select array_agg(x::text::int8) into v_late
    from pg_snapshot_xip(v_at.read) x
    where pg_visible_in_snapshot(x, v_at.target);

    -- Narrow rows first: what is left behind is not sorted with its payload. In one statement: a row that is erased
    -- meanwhile stands where it did.
    with located as materialized (
        select f.* from wh_find_events(v_at.position, v_low, v_at.started, v_at.ceiling, v_at."window", v_late, p_rows_max) f
    ), candidate as (
        select e.ctid as place, e.position, e.xid, e.xmin as row_xid, e.type_name,
            octet_length(e.payload) + coalesce(octet_length(e.metadata), 0) as size
        from wh_event_store e
        where e.ctid = any ((select l.places from located l)::tid[])
    ), found as (
        select c.place, c.position, c.size
        from candidate c
        where c.position > v_at.started
            and case
                when c.position > v_rebased then c.xid < v_xmax and not (c.xid = any (v_listed))
                    and (c.xid >= v_read_xmax or c.xid = any (v_read_listed))
                else v_is_before and c.position > v_at.before_from
                    and (c.xid >= v_before_xmax or c.xid = any (v_before_listed)
                        or v_at.before_is_foreign and c.xid & 4294967295 = c.row_xid::text::int8)
                    and (v_at.before_target is null or c.position > v_at.before_position
                        or c.xid >= v_before_target_xmax or c.xid = any (v_before_target_listed)
                        or v_at.before_is_foreign and c.xid & 4294967295 = c.row_xid::text::int8)
            end
            and (p_types is null and p_prefixes is null or c.type_name = any (p_types)
                or exists (select from unnest(p_prefixes) f where starts_with(c.type_name, f)))
        order by c.position
        limit p_rows_max + 1
    ), page as (
        select f.*, row_number() over (order by f.position) as turn,
            sum(f.size) over (order by f.position) as bytes, count(*) over () as found
        from found f
    )
    select array_agg(p.place), coalesce(max(p.found), 0), max(p.position), (select l.low from located l),
        (select l.window_end from located l), (select l.scanned from located l)
    into v_rows, v_found, v_last, v_low, v_end, v_scanned
    from page p
    where p.turn = 1 or p.turn <= p_rows_max and p.bytes <= p_bytes_max;

    if v_rows is not null then
        return query
        select e.stream_id, e.version, e.stream_seq, e.message_id, e.correlation_id, e.causation_id, e.trace_id,
            e.span_id, e.trace_flags, e.partition, e.type_name, e.content_type, e.metadata, e.payload, e.stored_at,
            e.position, null::text, null::bool
        from wh_event_store e
        where e.ctid = any (v_rows) and e.position + 0 <= v_last
        order by e.position;
        get diagnostics v_returned = row_count;
        if v_returned < cardinality(v_rows) then
            -- Erased rows stand elsewhere since the statement before: nothing is passed over.
            raise exception 'events of this page were erased or truncated while it was read: read it again'
                using errcode = '40001';
        end if;
    end if;
    v_at."window" := case when v_end <= v_low then v_at."window"
        -- Cut short: twice what it took.
        when v_found > coalesce(cardinality(v_rows), 0) then greatest((v_last - v_low) * 2, 4096)
        when v_scanned < p_rows_max then least(v_end - v_low, 1000000000000000) * 4
        else v_end - v_low end;
    v_whole := v_found = coalesce(cardinality(v_rows), 0) and v_end >= v_at.ceiling;
    if v_whole then
        v_at.read := v_at.target;
        v_at.floor := v_at.target_floor;
        v_at.target := null;
        v_at.target_floor := 0;
        v_at.position := 0;
        v_at.ceiling := null;
        v_at.quiet := true;
        v_at.before_from := greatest(v_at.before_from, v_rebased);
        v_at.before_read := '1:1:';
        v_at.before_target := null;
        v_at.before_position := 0;
    else
        v_at.position := case when v_found > coalesce(cardinality(v_rows), 0) then v_last else greatest(v_end, v_low) end;
        v_at.quiet := false;
    end if;
    v_place := jsonb_set(v_place, '{at}', to_jsonb(v_at));
    if not (v_at.quiet and v_before.quiet and v_at.read::text = v_before.read::text)
        and abs(v_now - (v_place ->> 'proved_at')::numeric) * 1000 >= p_prove_ms
        and wh_prove_place(v_xmax::text::xid8)
    then
        v_place := v_place || jsonb_build_object('proved', v_at, 'proved_at', v_now);
    end if;
    return query select null::uuid, null::int8, null::int8, null::uuid, null::uuid, null::uuid, null::uuid,
        null::int8, null::int2, null::int4, null::text, null::text, null::bytea, null::bytea, null::timestamptz,
        null::int8, v_place::text, v_whole;
end
$$;
