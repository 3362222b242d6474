-- claim_work: one page of what a shard's reader has not read: the log rows of a snapshot, by position, and the
-- messages behind their references.
-- in: p_incarnation, p_shard: the reader; owned rows of other shards of its incarnation are passed over
--     p_read_xmax, p_read_listed: read whole
--     p_page_xmax, p_page_listed, p_page_position: being read, and up to where (null: begin a new snapshot)
--     p_read_floor, p_page_floor, p_page_ceiling: bounds on positions, as answered before (0: not known)
--     p_partitions: whose messages to hand over; p_flushes: own flushes that are in memory; p_rows_max
--     p_streams_max: a page ends with the log row in which it comes to so many streams
-- out: a first row with epoch, the snapshot (page_xmax, page_listed), page_position (null: read whole), page_floor,
--     page_ceiling, the log rows passed (log_xid; log_own_flush: its number if it is an own flush in memory, 0 for
--     another owned row, null for one that is not owned), scheduled_in_ms;
--     then one row a reference, by log row (`log`: its index from 1) and place in it
-- locks: none    refused with 25006 on a standby: its snapshots do not list what runs
-- why positions: one call's messages lie together, and a stream's are ascending, whatever the order of transaction
--     ids. A page must therefore be cut by position, and must not sort what it leaves behind: few new rows are
--     found by transaction id and sorted; many are walked in their order, from the floor.
-- cost: about three times p_rows_max index entries at most, and a probe a reference
create or replace function @schema@.claim_work(
    p_incarnation int4, p_shard int2, p_read_xmax int8, p_read_listed int8[], p_page_xmax int8, p_page_listed int8[],
    p_page_position int8, p_read_floor int8, p_page_floor int8, p_page_ceiling int8,
    p_partitions int4[], p_flushes int8[], p_rows_max int4,
    p_streams_max int4)
returns table (
    epoch uuid, page_xmax int8, page_listed int8[], page_position int8, page_floor int8, page_ceiling int8,
    log_xid int8[], log_own_flush int8[], scheduled_in_ms int8,
    log int4, destination text, stream_seq int8, version int8, span_id int8, lane_id uuid, stream_id uuid,
    message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, partition int4, trace_flags int2,
    type_name text, content_type text, metadata bytea, payload bytea)
language plpgsql volatile
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_snapshot pg_snapshot;
    v_xmax int8 := p_page_xmax;
    v_listed int8[] := p_page_listed;
    v_ceiling int8 := p_page_ceiling;
    v_floor int8 := greatest(p_page_floor, p_read_floor);
    v_after int8 := coalesce(p_page_position, 0);
    v_from int8;
    v_walk_end int8;
    v_limit int4;
    v_few bool;
    v_page_end int8;
    v_size int8;
    v_found int4;
    v_position int8[];
    v_segment int2[];
    v_xid int8[];
    v_own_flush int8[];
    v_streams_end int4;
    v_epoch uuid;
    v_scheduled int8;
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: claims need the primary' using errcode = '25006';
    end if;
    select e.token into v_epoch from @schema@.wh_epoch e;
    if v_epoch is null then
        v_epoch := @schema@.wh_epoch_token();
    end if;

    if v_xmax is null then
        v_snapshot := pg_current_snapshot();
        v_xmax := pg_snapshot_xmax(v_snapshot)::text::int8;
        v_listed := array(select x::text::int8 from pg_snapshot_xip(v_snapshot) x);
        -- Later than the snapshot: whoever is in it had drawn its positions.
        v_ceiling := coalesce(pg_sequence_last_value('@schema@.wh_position'), 0) + 4095;
    end if;

    -- Little is new: take it by transaction id and sort it. Much is new: walk it in order, from where nothing unread
    -- lies below; log rows have between none and 180 references, so begin with few and take more only if they do not
    -- fill the page.
    v_few := not exists (
        select from @schema@.wh_log l where l.xid >= p_read_xmax and l.xid < v_xmax offset 128);
    v_limit := case when v_few then p_rows_max else least(32, p_rows_max) end;
    v_from := greatest(v_after, p_read_floor);
    loop
        v_walk_end := null;
        if not v_few then
            select l.position into v_walk_end
            from @schema@.wh_log l
            where l.position > v_from and l.position <= v_ceiling
            order by l.position
            offset v_limit + 256 limit 1;
        end if;
        v_walk_end := coalesce(v_walk_end, v_ceiling);

        with candidate as (
            select l.position, l.segment, l.xid, l.floor, l.owned, l.incarnation, l.flush_number,
                cardinality(l.partition) as size
            from @schema@.wh_log l
            where v_few and l.position > v_after
                and l.xid >= p_read_xmax and l.xid < v_xmax and not (l.xid = any (v_listed))
                and not (l.owned and l.incarnation = p_incarnation and l.shard <> p_shard)
            union all
            (select l.position, l.segment, l.xid, l.floor, l.owned, l.incarnation, l.flush_number,
                cardinality(l.partition)
            from @schema@.wh_log l
            where not v_few and l.position > v_from and l.position <= v_walk_end
                and l.xid >= p_read_xmax and l.xid < v_xmax and not (l.xid = any (v_listed))
                and not (l.owned and l.incarnation = p_incarnation and l.shard <> p_shard)
            order by l.position
            limit v_limit + 1)
            union all
            select l.*
            from unnest(p_read_listed) x
            cross join lateral (
                select l.position, l.segment, l.xid, l.floor, l.owned, l.incarnation, l.flush_number,
                    cardinality(l.partition)
                from @schema@.wh_log l
                where l.xid = x and l.position > v_after and l.position <= v_walk_end
                    and not (l.owned and l.incarnation = p_incarnation and l.shard <> p_shard)
                order by l.position
                limit v_limit + 1
            ) l
            where x < v_xmax and not (x = any (v_listed))
        ), found as (
            select c.position, c.segment, c.xid, c.floor, o.own_flush,
                case when o.own_flush > 0 then 0 else c.size end as size
            from candidate c
            cross join lateral (
                select case
                    when c.owned and c.incarnation = p_incarnation and c.flush_number = any (p_flushes)
                        then c.flush_number
                    when c.owned then 0
                end as own_flush
            ) o
            order by c.position
            limit v_limit + 1
        ), page as (
            select f.*, sum(f.size) over (order by f.position) - f.size as size_before, count(*) over () as found
            from found f
        )
        select coalesce(max(p.found), 0), coalesce(sum(p.size), 0), array_agg(p.position order by p.position),
            array_agg(p.segment order by p.position), array_agg(p.xid order by p.position),
            array_agg(p.own_flush order by p.position), greatest(v_floor, max(p.floor))
        into v_found, v_size, v_position, v_segment, v_xid, v_own_flush, v_floor
        from page p
        where p.size_before < p_rows_max;
        exit when v_size >= p_rows_max or v_limit >= p_rows_max
            or (v_found <= v_limit and v_walk_end = v_ceiling);
        v_limit := least(v_limit * 8, p_rows_max);
    end loop;
    v_page_end := case
        -- Cut by size, or by the limit on log rows: there may be more behind the last one taken.
        when v_found > cardinality(v_position) or v_found > v_limit then v_position[cardinality(v_position)]
        when v_walk_end < v_ceiling then v_walk_end
    end;

    -- Rows are the bound that is met first, unless there are to be fewer streams than rows.
    if p_streams_max < p_rows_max and p_streams_max < v_size then
        select f.turn into v_streams_end
        from (
            select min(k.turn)::int4 as turn
            from unnest(v_position, v_segment, v_own_flush) with ordinality k(position, segment, own_flush, turn)
            join @schema@.wh_log l on l.segment = k.segment and l.position = k.position
            cross join lateral (select unnest(l.partition) as partition, unnest(l.lane_id) as lane_id) r
            where coalesce(k.own_flush, 0) = 0 and r.partition = any (p_partitions)
            group by r.lane_id
        ) f
        order by f.turn
        offset p_streams_max - 1 limit 1;
        if v_streams_end < cardinality(v_position) then
            v_page_end := v_position[v_streams_end];
            v_position := v_position[1 : v_streams_end];
            v_segment := v_segment[1 : v_streams_end];
            v_xid := v_xid[1 : v_streams_end];
            v_own_flush := v_own_flush[1 : v_streams_end];
        end if;
    end if;

    select greatest(0, ceil(extract(epoch from s.due - clock_timestamp()) * 1000))::int8 into v_scheduled
    from (
        -- Bounded: beyond a thousand rows of other partitions the answer is early, never late.
        select s.due, s.partition = any (p_partitions) as held, row_number() over (order by s.due) as turn
        from (select s.due, s.partition from @schema@.wh_scheduled s order by s.due limit 1000) s
    ) s
    where s.held or s.turn = 1000
    order by s.due
    limit 1;

    return query select v_epoch, v_xmax, v_listed, v_page_end,
        v_floor, v_ceiling, v_xid, v_own_flush, v_scheduled,
        null::int4, null::text, null::int8, null::int8, null::int8, null::uuid, null::uuid, null::uuid, null::uuid,
        null::uuid, null::uuid, null::int4, null::int2, null::text, null::text, null::bytea, null::bytea;

    if v_position is not null then
        return query
        select null::uuid, null::int8, null::int8[], null::int8, null::int8, null::int8, null::int8[], null::int8[],
            null::int8,
            k.turn::int4, l.destination[r.destination], r.stream_seq, r.version, coalesce(e.span_id, o.span_id),
            r.lane_id, coalesce(e.stream_id, o.stream_id), coalesce(e.message_id, o.message_id),
            coalesce(e.correlation_id, o.correlation_id), coalesce(e.causation_id, o.causation_id),
            coalesce(e.trace_id, o.trace_id), r.partition, coalesce(e.trace_flags, o.trace_flags),
            coalesce(e.type_name, o.type_name), coalesce(e.content_type, o.content_type),
            coalesce(e.metadata, o.metadata), coalesce(e.payload, o.payload)
        from unnest(v_position, v_segment, v_own_flush) with ordinality k(position, segment, own_flush, turn)
        join @schema@.wh_log l on l.segment = k.segment and l.position = k.position
        cross join lateral (
            select generate_series(1, cardinality(l.partition)) as turn, unnest(l.partition) as partition,
                unnest(l.destination_index) as destination, unnest(l.stream_seq) as stream_seq,
                unnest(l.version) as version, unnest(l.lane_id) as lane_id
        ) r
        -- A null key ends the probe before it begins.
        left join @schema@.wh_event_store e on e.stream_id = r.lane_id and e.version = nullif(r.version, 0)
        left join lateral (
            select o.*
            from @schema@.wh_outbox o
            where o.segment = l.segment and o.lane_id = r.lane_id
                and o.stream_seq = case when r.version = 0 then r.stream_seq end
        ) o on true
        where coalesce(k.own_flush, 0) = 0 and r.partition = any (p_partitions)
        order by k.turn, r.turn;
    end if;
end
$$;
