-- read_subscription: one page of the events that partitions of a subscription have not read.
-- A place is: `resolved` (a partition: transactions read whole), `target` (the snapshot being read; null: none) and
-- `position` (what is in the target has been read up to here). Nothing waits for a transaction that is open, and none
-- that commits later is skipped: it is in no snapshot before. Along a stream positions grow, so the order is the
-- stream's; across streams a later page may hold lower positions.
-- in: p_subscription; p_partitions, p_resolved (one each); p_floor (the lowest of theirs); p_target, p_target_floor,
--     p_position; p_before (events of before a rebase are to be read too); p_ceiling, p_window: as answered before
--     (null: not known); p_quiet: whether all partitions stand where the last page ended, and that was whole;
--     p_types (names), p_prefixes (beginnings of names; with both, either): which events (null: all);
--     p_rows_max, p_bytes_max (payloads and metadata; one event at least)
-- out: the events by position; then a row with epoch, and the place behind the page. whole: everything in the target is
--     read: it is `resolved` of all partitions from now on and target_floor their floor, there is no target any more, and
--     p_before is false from now on. Else target, target_floor, "position", ceiling, next_window
-- another epoch than before: the server has crashed, and ids in a place that was not written down mean nothing: drop it,
--     and ask share_subscription
-- errors: 40001 if events of the page are erased or truncated while it is read: ask again
-- locks: none    refused with 25006 on a standby, with 25001 unless READ COMMITTED (a snapshot older than the target).
--     In a transaction of its own: else p_floor is kept, and the next page costs more
-- cost: windows of positions, over BRIN, of about eight times p_rows_max events at most, of all partitions and types;
--     transactions that have committed late by their id, over BRIN. A quiet look reads neither
create or replace function @schema@.read_subscription(
    p_subscription int4, p_partitions int4[], p_resolved pg_snapshot[], p_floor int8, p_target pg_snapshot,
    p_target_floor int8, p_position int8, p_before bool, p_ceiling int8, p_window int8, p_quiet bool, p_types text[],
    p_prefixes text[], p_rows_max int4, p_bytes_max int8)
returns table (
    stream_id uuid, version int8, stream_seq int8, message_id uuid, correlation_id uuid, causation_id uuid,
    trace_id uuid, span_id int8, trace_flags int2, "partition" int4, type_name text, content_type text,
    metadata bytea, payload bytea, stored_at timestamptz, "position" int8,
    epoch uuid, whole bool, target text, target_floor int8, ceiling int8, next_window int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_target pg_snapshot := p_target;
    v_target_floor int8 := p_target_floor;
    v_xmax int8;
    v_listed int8[];
    v_late int8[];
    v_ceiling int8 := p_ceiling;
    v_after int8 := case when p_target is null then 0 else p_position end;
    v_low int8;
    v_end int8;
    v_rebased int8;
    v_started int8;
    v_scanned int8;
    v_rows tid[];
    v_found int8;
    v_last int8;
    v_epoch uuid;
    v_returned int8;
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: subscriptions need the primary' using errcode = '25006';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'a subscription is read at READ COMMITTED' using errcode = '25001';
    end if;
    select e.token into v_epoch from wh_epoch e;
    if v_epoch is null then
        v_epoch := wh_epoch_token();
    end if;
    if v_target is null then
        v_ceiling := null;
        select e.edge, e.floor into v_target, v_target_floor from wh_read_edge() e;
        if p_quiet and v_target_floor = p_floor and not exists (
            select from pg_snapshot_xip(p_resolved[1]) x where pg_visible_in_snapshot(x, v_target))
        then
            return query select null::uuid, null::int8, null::int8, null::uuid, null::uuid, null::uuid, null::uuid,
                null::int8, null::int2, null::int4, null::text, null::text, null::bytea, null::bytea,
                null::timestamptz, 0::int8, v_epoch, true, p_resolved[1]::text, p_floor, null::int8, p_window;
            return;
        end if;
        v_target_floor := greatest(v_target_floor, p_floor);
    end if;
    if v_ceiling is null then
        -- Later than the snapshot: whoever is in it had drawn its positions.
        v_ceiling := coalesce(pg_sequence_last_value('wh_position'), 0) + 4095;
    end if;
    v_xmax := pg_snapshot_xmax(v_target)::text::int8;
    v_listed := array(select x::text::int8 from pg_snapshot_xip(v_target) x);
    select i.rebased_position into strict v_rebased from wh_installation i;
    select s.started_at into v_started from wh_subscription s where s.subscription = p_subscription;
    if not found then
        raise exception 'subscription % was removed', p_subscription using errcode = 'CL020';
    end if;

    v_low := greatest(v_after, v_started, case when p_before then 0 else greatest(p_floor, v_rebased) end);
    -- Listed as running where a partition stands, and in the target: what they wrote may lie below.
    select array_agg(distinct x::text::int8) into v_late
    from unnest(p_resolved) r
    cross join lateral pg_snapshot_xip(r) x
    where pg_visible_in_snapshot(x, v_target);

    -- Narrow rows first: what is left behind is not sorted with its payload. In one statement: a row that is erased
    -- meanwhile stands where it did.
    with located as materialized (
        select f.* from wh_find_events(v_after, v_low, v_started, v_ceiling, p_window, v_late, p_rows_max) f
    ), mine as materialized (
        select u.partition, pg_snapshot_xmax(u.resolved)::text::int8 as xmax,
            array(select x::text::int8 from pg_snapshot_xip(u.resolved) x) as listed, b.before_from,
            pg_snapshot_xmax(b.before_resolved)::text::int8 as before_xmax,
            array(select x::text::int8 from pg_snapshot_xip(b.before_resolved) x) as before_listed,
            case when b.before_target is null then 0 else b.before_position end as before_position,
            pg_snapshot_xmax(b.before_target)::text::int8 as before_target_xmax,
            array(select x::text::int8 from pg_snapshot_xip(b.before_target) x) as before_target_listed,
            b.before_is_foreign
        from unnest(p_partitions, p_resolved) u("partition", resolved)
        left join wh_subscription_partition b
            on p_before and b.subscription = p_subscription and b.partition = u.partition
    ), candidate as (
        select e.ctid as place, e.position, e.xid, e.xmin as row_xid, e.partition, e.type_name,
            octet_length(e.payload) + coalesce(octet_length(e.metadata), 0) as size
        from wh_event_store e
        where e.ctid = any ((select l.places from located l)::tid[])
    ), found as (
        select c.place, c.position, c.size
        from candidate c
        join mine m on m.partition = c.partition
        where c.position > v_started
            and case
                when c.position > v_rebased then
                    c.xid < v_xmax and not (c.xid = any (v_listed)) and (c.xid >= m.xmax or c.xid = any (m.listed))
                else p_before and c.position > m.before_from
                    and (c.xid >= m.before_xmax or c.xid = any (m.before_listed)
                        or m.before_is_foreign and c.xid & 4294967295 = c.row_xid::text::int8)
                    and (c.position > m.before_position or c.xid >= m.before_target_xmax
                        or c.xid = any (m.before_target_listed)
                        or m.before_is_foreign and c.xid & 4294967295 = c.row_xid::text::int8)
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
            e.position, null::uuid, null::bool, null::text, null::int8, null::int8, null::int8
        from wh_event_store e
        where e.ctid = any (v_rows)
        order by e.position;
        get diagnostics v_returned = row_count;
        if v_returned < cardinality(v_rows) then
            -- Erased rows stand elsewhere since the statement before: nothing is passed over.
            raise exception 'events of this page were erased or truncated while it was read: read it again'
                using errcode = '40001';
        end if;
    end if;
    return query select null::uuid, null::int8, null::int8, null::uuid, null::uuid, null::uuid, null::uuid,
        null::int8, null::int2, null::int4, null::text, null::text, null::bytea, null::bytea, null::timestamptz,
        case when v_found > coalesce(cardinality(v_rows), 0) then v_last else greatest(v_end, v_low) end,
        v_epoch, v_found = coalesce(cardinality(v_rows), 0) and v_end >= v_ceiling, v_target::text, v_target_floor,
        v_ceiling,
        case when v_end <= v_low then p_window
            -- Cut short: twice what it took.
            when v_found > coalesce(cardinality(v_rows), 0) then greatest((v_last - v_low) * 2, 4096)
            when v_scanned < p_rows_max then least(v_end - v_low, 1000000000000000) * 4
            else v_end - v_low end;
end
$$;
