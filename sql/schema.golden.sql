-- What pg_dump shows of a fresh schema. Written by tests/it/schema.rs with CORELANE_UPDATE_GOLDEN=1, never by hand.
CREATE SCHEMA corelane;

CREATE FUNCTION corelane.announce(p_incarnation integer DEFAULT NULL::integer) RETURNS void
    LANGUAGE sql
    AS $$
    select pg_notify("corelane".wh_channel(), 'work:' || coalesce(p_incarnation::text, ''))
$$;

CREATE FUNCTION corelane.check_installation(OUT fits boolean, OUT why_not text, OUT partition_count integer, OUT generation integer) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_here int8;
    v_database oid;
    v_installation wh_installation;
begin
    select c.system_identifier into v_here from pg_catalog.pg_control_system() c;
    select d.oid into v_database from pg_catalog.pg_database d where d.datname = pg_catalog.current_database();
    select i.* into v_installation from wh_installation i;
    partition_count := v_installation.partition_count;
    generation := v_installation.generation;
    if v_installation.only_row is null then
        why_not := 'the installation has no row in wh_installation: the migration did not end';
    elsif v_installation.system_identifier <> v_here then
        why_not := pg_catalog.format('it was made on server %s and is now on server %s (a restored dump, a logical copy or an '
            'upgraded server): stop what works with it, then run `corelane rebase`',
            v_installation.system_identifier, v_here);
    elsif v_installation.database_oid <> v_database then
        why_not := pg_catalog.format('it was made in another database of this server (oid %s, this one has %s), so this is a copy: '
            'run `corelane rebase` if it is to work on its own', v_installation.database_oid, v_database);
    end if;
    fits := why_not is null;
end
$$;

CREATE FUNCTION corelane.claim_parked(p_lane_id uuid, p_destination text, p_rows_max integer) RETURNS TABLE(stream_seq bigint, version bigint, span_id bigint, stream_id uuid, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, partition integer, trace_flags smallint, type_name text, content_type text, metadata bytea, payload bytea)
    LANGUAGE sql STABLE
    AS $$
    select k.stream_seq, k.version, coalesce(e.span_id, k.span_id), coalesce(e.stream_id, k.stream_id),
        coalesce(e.message_id, k.message_id), coalesce(e.correlation_id, k.correlation_id),
        coalesce(e.causation_id, k.causation_id), coalesce(e.trace_id, k.trace_id), k.partition,
        coalesce(e.trace_flags, k.trace_flags), coalesce(e.type_name, k.type_name),
        coalesce(e.content_type, k.content_type), coalesce(e.metadata, k.metadata), coalesce(e.payload, k.payload)
    from (
        select k.*
        from "corelane".wh_parked_reference k
        where k.lane_id = p_lane_id and k.destination = p_destination
        order by k.stream_seq
        limit p_rows_max
    ) k
    left join "corelane".wh_event_store e on k.version > 0 and e.stream_id = k.lane_id and e.version = k.version
    order by k.stream_seq
$$;

CREATE FUNCTION corelane.claim_work(p_incarnation integer, p_shard smallint, p_read_xmax bigint, p_read_listed bigint[], p_page_xmax bigint, p_page_listed bigint[], p_page_position bigint, p_read_floor bigint, p_page_floor bigint, p_page_ceiling bigint, p_partitions integer[], p_flushes bigint[], p_rows_max integer) RETURNS TABLE(epoch uuid, page_xmax bigint, page_listed bigint[], page_position bigint, page_floor bigint, page_ceiling bigint, log_xid bigint[], log_own_flush bigint[], scheduled_in_ms bigint, log integer, destination text, stream_seq bigint, version bigint, span_id bigint, lane_id uuid, stream_id uuid, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, partition integer, trace_flags smallint, type_name text, content_type text, metadata bytea, payload bytea)
    LANGUAGE sql
    AS $$
    select c.* from "corelane".claim_work(p_incarnation, p_shard, p_read_xmax, p_read_listed, p_page_xmax, p_page_listed,
        p_page_position, p_read_floor, p_page_floor, p_page_ceiling, p_partitions, p_flushes, p_rows_max, p_rows_max) c
$$;

CREATE FUNCTION corelane.claim_work(p_incarnation integer, p_shard smallint, p_read_xmax bigint, p_read_listed bigint[], p_page_xmax bigint, p_page_listed bigint[], p_page_position bigint, p_read_floor bigint, p_page_floor bigint, p_page_ceiling bigint, p_partitions integer[], p_flushes bigint[], p_rows_max integer, p_streams_max integer) RETURNS TABLE(epoch uuid, page_xmax bigint, page_listed bigint[], page_position bigint, page_floor bigint, page_ceiling bigint, log_xid bigint[], log_own_flush bigint[], scheduled_in_ms bigint, log integer, destination text, stream_seq bigint, version bigint, span_id bigint, lane_id uuid, stream_id uuid, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, partition integer, trace_flags smallint, type_name text, content_type text, metadata bytea, payload bytea)
    LANGUAGE plpgsql
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
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
    select e.token into v_epoch from "corelane".wh_epoch e;
    if v_epoch is null then
        v_epoch := "corelane".wh_epoch_token();
    end if;

    if v_xmax is null then
        v_snapshot := pg_current_snapshot();
        v_xmax := pg_snapshot_xmax(v_snapshot)::text::int8;
        v_listed := array(select x::text::int8 from pg_snapshot_xip(v_snapshot) x);
        -- Later than the snapshot: whoever is in it had drawn its positions.
        v_ceiling := coalesce(pg_sequence_last_value('"corelane".wh_position'), 0) + 4095;
    end if;

    -- Little is new: take it by transaction id and sort it. Much is new: walk it in order, from where nothing unread
    -- lies below; log rows have between none and 180 references, so begin with few and take more only if they do not
    -- fill the page.
    v_few := not exists (
        select from "corelane".wh_log l where l.xid >= p_read_xmax and l.xid < v_xmax offset 128);
    v_limit := case when v_few then p_rows_max else least(32, p_rows_max) end;
    v_from := greatest(v_after, p_read_floor);
    loop
        v_walk_end := null;
        if not v_few then
            select l.position into v_walk_end
            from "corelane".wh_log l
            where l.position > v_from and l.position <= v_ceiling
            order by l.position
            offset v_limit + 256 limit 1;
        end if;
        v_walk_end := coalesce(v_walk_end, v_ceiling);

        with candidate as (
            select l.position, l.segment, l.xid, l.floor, l.owned, l.incarnation, l.flush_number,
                cardinality(l.partition) as size
            from "corelane".wh_log l
            where v_few and l.position > v_after
                and l.xid >= p_read_xmax and l.xid < v_xmax and not (l.xid = any (v_listed))
                and not (l.owned and l.incarnation = p_incarnation and l.shard <> p_shard)
            union all
            (select l.position, l.segment, l.xid, l.floor, l.owned, l.incarnation, l.flush_number,
                cardinality(l.partition)
            from "corelane".wh_log l
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
                from "corelane".wh_log l
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
            join "corelane".wh_log l on l.segment = k.segment and l.position = k.position
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
        from (select s.due, s.partition from "corelane".wh_scheduled s order by s.due limit 1000) s
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
        join "corelane".wh_log l on l.segment = k.segment and l.position = k.position
        cross join lateral (
            select generate_series(1, cardinality(l.partition)) as turn, unnest(l.partition) as partition,
                unnest(l.destination_index) as destination, unnest(l.stream_seq) as stream_seq,
                unnest(l.version) as version, unnest(l.lane_id) as lane_id
        ) r
        -- A null key ends the probe before it begins.
        left join "corelane".wh_event_store e on e.stream_id = r.lane_id and e.version = nullif(r.version, 0)
        left join lateral (
            select o.*
            from "corelane".wh_outbox o
            where o.segment = l.segment and o.lane_id = r.lane_id
                and o.stream_seq = case when r.version = 0 then r.stream_seq end
        ) o on true
        where coalesce(k.own_flush, 0) = 0 and r.partition = any (p_partitions)
        order by k.turn, r.turn;
    end if;
end
$$;

CREATE FUNCTION corelane.compute_partition(id uuid, partition_count integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select (((
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 0) * 8003291233386496::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 1) * 31262856380416::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 2) * 122120532736::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 3) * 477033331::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 4) * 7748488540454912::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 5) * 30267533361152::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 6) * 118232552192::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 7) * 461845907::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 8) * 7272829804347392::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 9) * 28409491423232::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 10) * 110974575872::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 11) * 433494437::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 12) * 8505245101457408::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 13) * 33223613677568::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 14) * 129779740928::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 15) * 506952113::int8
    ) >> 20) % partition_count)::int4
$$;

CREATE FUNCTION corelane.deregister_instance(p_incarnation integer) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_alive bool;
begin
    perform pg_advisory_xact_lock(wh_lock_class(3), p_incarnation);
    update wh_instance i set state = 2 where i.number = p_incarnation and i.state = 0;
    v_alive := found;
    if v_alive then
        perform wh_free_partitions(p_incarnation);
        perform pg_notify(wh_channel(), 'members');
    end if;
    perform pg_advisory_unlock(l.classid::int4, l.objid::int4)
    from pg_locks l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 2
        and l.classid::int8 = wh_lock_class(4) and l.objid::int8 = p_incarnation;
    return v_alive;
end
$$;

CREATE FUNCTION corelane.find_duplicates(p_message_id uuid[]) RETURNS SETOF uuid
    LANGUAGE sql STABLE
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    AS $$
    select m.id
    from unnest(p_message_id) m(id)
    -- The limit keeps it a probe an id, whatever the planner believes of the table.
    cross join lateral (
        select from "corelane".wh_outbox o where o.lane_id = "corelane".wh_lane(m.id) and o.stream_seq = 1 limit 1
    ) o
$$;

CREATE FUNCTION corelane.find_flush(p_incarnation integer, p_shard smallint, p_flush bigint, p_since bigint, p_stream_id uuid[]) RETURNS TABLE(xid bigint, epoch uuid, "position" bigint, owned boolean, last_seq bigint[], last_version bigint[])
    LANGUAGE sql
    AS $$
    select f.* from "corelane".find_flush(p_incarnation, p_shard, p_flush, p_since, p_stream_id,
        array_fill(2147483647, array[cardinality(p_stream_id)])) f
$$;

CREATE FUNCTION corelane.find_flush(p_incarnation integer, p_shard smallint, p_flush bigint, p_since bigint, p_stream_id uuid[], p_stream_rows integer[]) RETURNS TABLE(xid bigint, epoch uuid, "position" bigint, owned boolean, last_seq bigint[], last_version bigint[])
    LANGUAGE plpgsql
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
#variable_conflict use_column
declare
    v_xid int8;
    v_position int8;
    v_owned bool;
    v_truncated bool := false;
    v_incomplete text;
    v_last_seq int8[];
    v_last_version int8[];
begin
    perform pg_advisory_xact_lock("corelane".wh_lock_class(7), "corelane".wh_flush_key(p_incarnation, p_shard));

    select min(l.xid), min(l.position), bool_and(l.owned) into v_xid, v_position, v_owned
    from "corelane".wh_log l
    where l.xid >= p_since and l.incarnation = p_incarnation and l.shard = p_shard and l.flush_number = p_flush;
    if v_xid is null then
        -- A later statement: if the log rows went a moment ago, what was noted of them is there.
        select t.xid, t.position, t.owned, true into v_xid, v_position, v_owned, v_truncated
        from "corelane".wh_flush_truncated t
        where t.incarnation = p_incarnation and t.shard = p_shard and t.flush_number = p_flush;
    end if;
    if v_xid is null then
        if not exists (select from "corelane".wh_instance i where i.number = p_incarnation and i.state = 0) then
            -- Its successors may have published what it stored, and a rotation may have truncated it.
            raise exception 'whether flush % of incarnation % was stored cannot be told any more: the incarnation has ended',
                p_flush, p_incarnation using errcode = 'CL005';
        end if;
        insert into "corelane".wh_flush_given_up as g (flush_number, incarnation, shard)
        values (p_flush, p_incarnation, p_shard)
        on conflict (incarnation, shard) do update
        set flush_number = greatest(g.flush_number, excluded.flush_number), given_up_at = excluded.given_up_at;
        return;
    end if;

    select array_agg(n.last_seq order by n.turn), array_agg(n.last_version order by n.turn),
        min(n.id::text) filter (where n.found < p_stream_rows[n.turn])
    into v_last_seq, v_last_version, v_incomplete
    from (
        select s.turn, s.id, e.found + o.found as found, coalesce(least(e.first_seq, o.first_seq) - 1, 0) as last_seq,
            coalesce(e.first_version - 1, (
                select v.version from "corelane".wh_event_store v
                where v.stream_id = s.id and v.xid <> v_xid and v.position < v_position
                order by v.version desc limit 1), 0) as last_version
        from unnest(p_stream_id) with ordinality s(id, turn)
        cross join lateral (
            select count(*) as found, min(e.stream_seq) as first_seq, min(e.version) as first_version
            from "corelane".wh_event_store e where e.stream_id = s.id and e.xid = v_xid
        ) e
        cross join lateral (
            select count(*) as found, min(o.stream_seq) as first_seq
            from "corelane".wh_outbox o where o.lane_id = s.id and o.xid = v_xid
        ) o
    ) n;
    if v_truncated and v_incomplete is not null then
        raise exception 'the messages of flush % are stored, and what numbers they have cannot be told any more (stream %)',
            p_flush, v_incomplete using errcode = 'CL006';
    end if;
    return query select v_xid, "corelane".wh_epoch_token(), v_position, v_owned, v_last_seq, v_last_version;
end
$$;

CREATE FUNCTION corelane.hold_instance(p_incarnation integer) RETURNS boolean
    LANGUAGE sql
    AS $$
    select pg_try_advisory_lock("corelane".wh_lock_class(4), p_incarnation)
$$;

CREATE FUNCTION corelane.keep_resolved(p_incarnation integer, p_epoch uuid, p_partitions integer[], p_resolved pg_snapshot[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    perform pg_advisory_xact_lock_shared(wh_lock_class(3), p_incarnation);
    update wh_partition p
    set base = wh_snapshot_union(p.base, u.resolved)
    from unnest(p_partitions, p_resolved) u("partition", resolved)
    where p.partition = u.partition and p.owner = p_incarnation
        and p_epoch = (select e.token from wh_epoch e);
end
$$;

CREATE FUNCTION corelane.listen_instance() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    execute format('listen %I', wh_channel());
end
$$;

CREATE FUNCTION corelane.load_shard(p_incarnation integer, p_partitions integer[]) RETURNS TABLE(partition integer, base text, cursor text, lane_id uuid, destination text, attempts integer, due_in_ms bigint)
    LANGUAGE sql STABLE
    AS $$
    select r.partition, r.base::text, r.cursor::text, null::uuid, null::text, null::int4, null::int8
    from "corelane".wh_resolved r
    where r.owner = p_incarnation and r.partition = any (p_partitions)
    union all
    select k.partition, null, null, k.lane_id, k.destination, k.attempts,
        ceil(extract(epoch from k.due - clock_timestamp()) * 1000)::int8
    from "corelane".wh_parked k
    where k.partition = any (p_partitions)
$$;

CREATE FUNCTION corelane.mark_dead(p_incarnation integer, p_counter bigint, p_early boolean) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    if p_early and not pg_try_advisory_xact_lock(wh_lock_class(4), p_incarnation) then
        return false;
    end if;
    perform pg_advisory_xact_lock(wh_lock_class(3), p_incarnation);
    update wh_instance i
    set state = 1
    where i.number = p_incarnation and i.state = 0
        and (p_early and i.direct or i.counter = p_counter and i.lease_until < clock_timestamp());
    if not found then
        return false;
    end if;
    perform wh_free_partitions(p_incarnation);
    perform pg_notify(wh_channel(), 'members');
    return true;
end
$$;

CREATE FUNCTION corelane.members(p_incarnation integer) RETURNS TABLE(free_partitions integer, number integer, id uuid, counter bigint, expired boolean, connected boolean, owns boolean, held integer, free integer[])
    LANGUAGE sql
    AS $$
    select cardinality(f.free), i.number, i.id, i.counter, i.lease_until < clock_timestamp(),
        case
            when not i.direct then true
            when i.number is not null then i.number::oid in (
                select l.objid from pg_locks l
                where l.locktype = 'advisory' and l.classid = "corelane".wh_lock_class(4)::oid and l.objsubid = 2
                    and l.granted
                    and l.database = (select d.oid from pg_database d where d.datname = current_database()))
        end,
        coalesce(i.owns, i.held > 0), i.held, f.free
    from (
        select coalesce(array_agg(p.partition order by p.partition) filter (where p.owner is null), '{}') as free
        from "corelane".wh_partition p
    ) f
    left join (
        select i.*, coalesce(o.held, 0) as held
        from "corelane".wh_instance i
        left join (select p.owner, count(*)::int4 as held from "corelane".wh_partition p group by p.owner) o
            on o.owner = i.number
        where i.state = 0 and i.number <> p_incarnation and (i.owns or o.held > 0)
    ) i on true
    order by i.number
$$;

CREATE FUNCTION corelane.perform_maintenance(p_incarnation integer, OUT truncated integer, OUT rotated boolean, OUT blocked_by integer, OUT cursors_trimmed integer, OUT work_left boolean, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $_$
declare
    v_current int2;
    v_switched_at timestamptz;
    v_segment int2;
    v_rotation wh_rotation;
    v_done bool;
    v_filled bool;
    v_bytes int8;
begin
    truncated := 0;
    rotated := false;
    cursors_trimmed := 0;
    work_left := false;
    more := false;
    if not pg_try_advisory_xact_lock(wh_lock_class(6), 0)
        or not exists (select from wh_instance i where i.number = p_incarnation and i.state = 0) then
        return;
    end if;
    perform set_config('lock_timeout', '1s', true);

    delete from wh_cursor c
    using (
        -- Superseded, or of an incarnation whose partitions have its cursors as their bases.
        select c.incarnation, c.shard, c.number from wh_cursor c
        where exists (select from wh_cursor n
                where n.incarnation = c.incarnation and n.shard = c.shard and n.number > c.number)
            or not exists (select from wh_partition p where p.owner = c.incarnation)
            and not exists (select from wh_instance i where i.number = c.incarnation and i.state = 0)
        limit 1000
    ) old
    where c.incarnation = old.incarnation and c.shard = old.shard and c.number = old.number;
    get diagnostics cursors_trimmed = row_count;
    delete from wh_instance i
    where i.state <> 0 and i.lease_until < clock_timestamp() - interval '1 day'
        and not exists (select from wh_partition p where p.owner = i.number)
        and i.number in (select d.number from wh_instance d where d.state <> 0 order by d.number limit 100);

    delete from wh_flush_given_up g where g.given_up_at < clock_timestamp() - interval '1 day';
    delete from wh_flush_truncated t
    where not exists (select from wh_instance i where i.number = t.incarnation and i.state = 0);

    select s.current, s.switched_at into strict v_current, v_switched_at from wh_segment s;
    -- The one that writers go to next comes first: while it is not empty they cannot be switched.
    foreach v_segment in array array[(v_current + 1) % 3, (v_current + 2) % 3] loop
        execute format('select exists (select from wh_log_%s)', v_segment) into v_filled;
        continue when not v_filled;
        work_left := true;
        select r.* into v_rotation from wh_rotation r where r.segment = v_segment;
        if v_rotation.segment is null then
            insert into wh_rotation (segment, seen) values (v_segment, pg_current_snapshot())
            returning * into v_rotation;
        end if;
        v_done := v_rotation.is_resolved or wh_check_resolved(v_segment);
        if not v_done then
            more := more or exists (
                select from wh_rotation r where r.segment = v_segment and r.resolved_to > v_rotation.resolved_to);
            continue;
        end if;
        if not (v_rotation.is_noted or wh_note_flushes(v_segment)) then
            more := true;
            return;
        end if;
        if not v_rotation.is_carried then
            -- Committed before the lock is taken: who looks a number up afterwards must find it.
            perform wh_carry_numbers(v_segment);
            more := true;
            return;
        end if;
        select (t.truncated)::int4, t.blocked_by into truncated, blocked_by from wh_truncate_segment(v_segment) t;
        more := truncated > 0;
        return;
    end loop;

    v_segment := (v_current + 1) % 3;
    execute format('select exists (select from wh_log_%s)', v_current) into v_filled;
    work_left := work_left or v_filled;
    execute format('select $1 and not exists (select from wh_log_%s)', v_segment) into v_filled using v_filled;
    if v_filled then
        v_bytes := pg_total_relation_size(format('wh_log_%s', v_current)::regclass)
            + pg_total_relation_size(format('wh_outbox_%s', v_current)::regclass);
        if v_switched_at < clock_timestamp() - interval '60 s'
            or v_bytes > 268435456 and v_switched_at < clock_timestamp() - interval '5 s' then
            update wh_segment s set current = v_segment, switched_at = clock_timestamp();
            rotated := true;
            more := true;
        end if;
    end if;
end
$_$;

CREATE FUNCTION corelane.rebase(p_force boolean, OUT done boolean, OUT generation integer, OUT pending bigint, OUT parked bigint, OUT scheduled bigint, OUT dead_letters bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
declare
    v_server int8;
    v_other_server bool;
    v_instance text;
    v_xid int8;
    v_position int8;
    v_sequence record;
    v_last int8;
begin
    lock table wh_installation in exclusive mode;
    lock table wh_log, wh_outbox, wh_event_store, wh_scheduled, wh_partition, wh_cursor, wh_instance, wh_parked,
        wh_parked_reference, wh_dead_letter, wh_stream, wh_segment, wh_rotation in access exclusive mode;
    select c.system_identifier into v_server from pg_catalog.pg_control_system() c;
    select i.system_identifier <> v_server, i.generation into strict v_other_server, generation from wh_installation i;
    done := false;
    if not p_force and (select c.fits from check_installation() c) then
        return;
    end if;
    if not v_other_server then
        select format('%s (%s, incarnation %s)', i.instance_name, i.service_name, i.number) into v_instance
        from wh_instance i where i.state = 0 and i.lease_until > clock_timestamp() order by i.number limit 1;
        if v_instance is not null and (select c.fits from check_installation() c) then
            raise exception 'instance % works here: stop it first', v_instance using errcode = '55006';
        end if;
    end if;

    v_xid := pg_current_xact_id()::text::int8;
    with old as (
        select l.*, v_other_server and l.xid & 4294967295 = l.xmin::text::int8 as born_here from wh_log l
    ), gone as (
        delete from wh_log
    ), resolved as materialized (
        select r.partition, r.base, r.cursor from wh_resolved r
    )
    insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version, lane_id,
        destination)
    select o.position, v_xid, 0, o.segment, false, k.partition, k.destination_index, k.stream_seq, k.version, k.lane_id,
        o.destination
    from old o
    cross join lateral (
        select array_agg(u.partition order by u.turn) as partition,
            array_agg(u.destination_index order by u.turn) as destination_index,
            array_agg(u.stream_seq order by u.turn) as stream_seq, array_agg(u.version order by u.turn) as version,
            array_agg(u.lane_id order by u.turn) as lane_id
        from unnest(o.partition, o.destination_index, o.stream_seq, o.version, o.lane_id)
            with ordinality u(partition, destination_index, stream_seq, version, lane_id, turn)
        join resolved r on r.partition = u.partition
        where o.born_here
            or not pg_visible_in_snapshot(o.xid::text::xid8, r.base)
            and not pg_visible_in_snapshot(o.xid::text::xid8, r.cursor)
    ) k
    where k.partition is not null
    order by o.position;

    -- What gives numbers: some ways to copy leave sequences behind.
    select greatest(
        (select max(e.position) from wh_event_store e), (select max(o.position) from wh_outbox o),
        (select max(l.position) from wh_log l), pg_sequence_last_value('wh_position'::regclass), 0) into v_position;
    perform setval('wh_position', v_position + 4096);
    for v_sequence in
        select s.name, pg_get_serial_sequence(s.name, s.key) as sequence, s.key
        from (values ('wh_instance', 'number'), ('wh_cursor', 'number'), ('wh_dead_letter', 'dead_letter_id'),
            ('wh_scheduled', 'scheduled_id')) s(name, key)
    loop
        execute format('select max(%I) from %I', v_sequence.key, v_sequence.name) into v_last;
        v_last := greatest(v_last, pg_sequence_last_value(v_sequence.sequence::regclass));
        if v_last is not null then
            perform setval(v_sequence.sequence, v_last);
        end if;
    end loop;

    -- Nothing is resolved but what is not in the log any more.
    update wh_partition set base = '1:1:', owner = null, ownership = 0, fence = wh_partition.fence + 1;
    delete from wh_cursor;
    delete from wh_instance;
    delete from wh_rotation;
    delete from wh_epoch;
    insert into wh_epoch default values;
    update wh_installation i
    set system_identifier = v_server, generation = i.generation + 1, rebased_position = v_position + 4095,
        database_oid = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
    returning i.generation into generation;

    done := true;
    select coalesce(sum(cardinality(l.partition)), 0) into pending from wh_log l;
    select count(*) into parked from wh_parked;
    select count(*) into scheduled from wh_scheduled;
    select count(*) into dead_letters from wh_dead_letter;
end
$$;

CREATE FUNCTION corelane.register_instance(p_id uuid, p_service_name text, p_instance_name text, p_lease_ms bigint, p_shards integer, p_owns boolean DEFAULT NULL::boolean, p_direct boolean DEFAULT true, OUT number integer, OUT partition_count integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_why_not text;
    v_service_name text;
begin
    select c.why_not, c.partition_count into v_why_not, partition_count from check_installation() c;
    if v_why_not is not null then
        raise exception '%', v_why_not using errcode = 'CL002';
    end if;
    if p_owns then
        -- One after the other: two services that start together must not both find nobody.
        perform pg_advisory_xact_lock(wh_lock_class(6), 1);
        select i.service_name into v_service_name
        from wh_instance i
        where i.state = 0 and i.service_name <> p_service_name and i.lease_until > clock_timestamp()
            and coalesce(i.owns, exists (select from wh_partition p where p.owner = i.number))
        order by i.number limit 1;
        if found then
            raise exception 'the partitions of this schema belong to the service %: service % cannot own any',
                v_service_name, p_service_name
                using errcode = 'CL008', hint = 'Give each service a schema of its own, or let this one only store.';
        end if;
    end if;
    insert into wh_instance as i (id, service_name, instance_name, lease_until, shards, owns, direct)
    values (p_id, p_service_name, p_instance_name, clock_timestamp() + p_lease_ms * interval '1 millisecond', p_shards,
        p_owns, p_direct)
    returning i.number into "number";
    if p_direct then
        perform pg_advisory_lock(wh_lock_class(4), "number");
    end if;
    if p_owns then
        perform pg_notify(wh_channel(), 'members');
    end if;
end
$$;

CREATE FUNCTION corelane.release_partitions(p_incarnation integer, p_epoch uuid, p_partitions integer[], p_resolved pg_snapshot[], OUT ownership bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    perform pg_advisory_xact_lock(wh_lock_class(3), p_incarnation);
    update wh_instance i set ownership = i.ownership + 1
    where i.number = p_incarnation and i.state = 0
    returning i.ownership into ownership;
    if not found then
        return;
    end if;
    update wh_partition p
    set owner = null, fence = p.fence + 1,
        base = case
            when u.resolved is not null and p_epoch = (select e.token from wh_epoch e)
                then wh_snapshot_union(wh_snapshot_union(r.base, r.cursor), u.resolved)
            else wh_snapshot_union(r.base, r.cursor)
        end
    from unnest(p_partitions, p_resolved) u("partition", resolved)
    join wh_resolved r on r.partition = u.partition
    where p.partition = u.partition and p.owner = p_incarnation;
    if found then
        perform pg_notify(wh_channel(), 'members');
    end if;
end
$$;

CREATE FUNCTION corelane.release_scheduled(p_incarnation integer, p_partitions integer[], p_rows_max integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
declare
    v_now constant timestamptz := clock_timestamp();
    v_lock_timeout constant text := current_setting('lock_timeout');
    v_partition_count int4;
    v_candidate int8[];
    v_partition int4;
    v_locked_partitions int4[] := '{}';
    v_patience int4 := 10;
    v_locked_streams uuid[];
    v_count int4;
    v_released record;
begin
    perform pg_advisory_xact_lock_shared(wh_lock_class(3), p_incarnation);
    select i.partition_count into v_partition_count
    from wh_installation i
    where exists (select from wh_instance m where m.number = p_incarnation and m.state = 0);
    if v_partition_count is null then
        return 0;
    end if;
    select array_agg(s.scheduled_id) into v_candidate
    from (
        select s.scheduled_id from wh_scheduled s
        where s.due <= v_now and s.partition = any (p_partitions)
        order by s.due, s.scheduled_id
        limit p_rows_max
    ) s;
    if v_candidate is null then
        return 0;
    end if;

    for v_partition in
        select distinct s.partition from wh_scheduled s
        where s.scheduled_id = any (v_candidate) and s.stream_id is not null order by 1
    loop
        if pg_try_advisory_xact_lock_shared(wh_lock_class(1), v_partition) then
            v_locked_partitions := v_locked_partitions || v_partition;
        elsif v_patience > 0 then
            -- The shard's own flush holds it for some milliseconds at a time, often: worth a short wait.
            v_patience := v_patience - 1;
            begin
                perform set_config('lock_timeout', '20ms', true);
                perform pg_advisory_xact_lock_shared(wh_lock_class(1), v_partition);
                perform set_config('lock_timeout', v_lock_timeout, true);
                v_locked_partitions := v_locked_partitions || v_partition;
            exception when lock_not_available then
                null;
            end;
        end if;
    end loop;
    select array_agg(l.stream_id) into v_locked_streams
    from (
        select s.stream_id, s.key from (
            select distinct s.stream_id, wh_stream_key(s.stream_id) as key from wh_scheduled s
            where s.scheduled_id = any (v_candidate) and s.stream_id is not null
                and s.partition = any (v_locked_partitions)
            order by key limit 256
        ) s
        where pg_try_advisory_xact_lock(wh_lock_class(2), s.key)
    ) l;

    -- A later statement than the locks.
    with free as (
        select s.scheduled_id from wh_scheduled s
        where s.scheduled_id = any (v_candidate)
            and (s.stream_id is null or s.stream_id = any (v_locked_streams))
        for update skip locked
    ), gone as (
        delete from wh_scheduled s using free f where s.scheduled_id = f.scheduled_id returning s.*
    ), judged as (
        select g.*, g.stream_id is null and (
            exists (select from wh_outbox o
                where o.lane_id in (wh_lane(g.message_id), g.message_id) and o.stream_seq = 1 and o.stream_id is null)
            or row_number() over (partition by g.stream_id, g.message_id order by g.due, g.scheduled_id) > 1) as is_double
        from gone g
    ), doubles as (
        -- Refused when it is due, as it would be if it were stored now. No `on conflict`: a key of its own, or an error.
        insert into wh_dead_letter (stream_seq, version, span_id, lane_id, message_id, correlation_id, causation_id,
            trace_id, partition, attempts, trace_flags, reason, destination, error, error_fingerprint, type_name,
            content_type, metadata, payload)
        select -j.scheduled_id, 0, j.span_id, j.lane_id, j.message_id, j.correlation_id, j.causation_id,
            j.trace_id, j.partition, 0, j.trace_flags, 4, d.name, e.text, md5(e.text), j.type_name, j.content_type, j.metadata, j.payload
        from judged j
        cross join lateral (select distinct n.name from unnest(j.destination) n(name)) d
        cross join (select 'a message of this id is stored already' as text) e
        where j.is_double
    ), released as (
        select j.*, row_number() over (order by j.due, j.scheduled_id)::int4 as turn from judged j where not j.is_double
    )
    select array_agg(r.message_id order by r.turn) as message_ids, array_agg(r.stream_id order by r.turn) as stream_ids,
        array_agg(r.type_name order by r.turn) as type_names, array_agg(r.payload order by r.turn) as payloads,
        array_agg(false) as event_flags, array_agg(null::text) as destinations,
        array_agg(r.correlation_id order by r.turn) as correlation_ids,
        array_agg(r.causation_id order by r.turn) as causation_ids, array_agg(r.trace_id order by r.turn) as trace_ids,
        array_agg(r.span_id order by r.turn) as span_ids, array_agg(r.trace_flags order by r.turn) as trace_flags,
        array_agg(r.content_type order by r.turn) as content_types, array_agg(r.metadata order by r.turn) as metadata,
        (select array_agg(r.turn order by r.turn, d.turn)
            from released r, unnest(r.destination) with ordinality d(name, turn)) as reference_messages,
        (select array_agg(d.name order by r.turn, d.turn)
            from released r, unnest(r.destination) with ordinality d(name, turn)) as reference_destinations
    into v_released
    from released r;
    v_count := coalesce(cardinality(v_released.message_ids), 0);
    if v_count > 0 then
        perform from wh_store_locked(v_partition_count, v_released.message_ids, v_released.stream_ids,
            v_released.type_names, v_released.payloads, v_released.event_flags, v_released.destinations,
            v_released.reference_messages, v_released.reference_destinations, v_released.correlation_ids,
            v_released.causation_ids, v_released.trace_ids, v_released.span_ids, v_released.trace_flags,
            v_released.content_types, v_released.metadata, null);
    end if;
    return v_count;
end
$$;

CREATE FUNCTION corelane.renew_lease(p_incarnation integer, p_lease_ms bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    update wh_instance i
    set counter = i.counter + 1, lease_until = clock_timestamp() + p_lease_ms * interval '1 millisecond'
    where i.number = p_incarnation and i.state = 0 and i.lease_until > clock_timestamp();
    return found;
end
$$;

CREATE FUNCTION corelane.settle(p_incarnation integer, p_shard smallint, p_ownership bigint, p_epoch uuid, p_cursor pg_snapshot, p_park_lane uuid[], p_park_destination text[], p_park_partition integer[], p_park_seq bigint[], p_park_attempts integer[], p_park_reason smallint[], p_park_error text[], p_park_error_cut boolean[], p_park_due_in_ms bigint[], p_spill_lane uuid[], p_spill_destination text[], p_spill_partition integer[], p_spill_seq bigint[], p_spill_version bigint[], p_drained_lane uuid[], p_drained_destination text[], p_drained_partition integer[], p_drained_seq bigint[], p_dead_lane uuid[], p_dead_destination text[], p_dead_partition integer[], p_dead_seq bigint[], p_dead_version bigint[], p_dead_attempts integer[], p_dead_reason smallint[], p_dead_error text[], p_dead_error_cut boolean[], p_unpark_lane uuid[], p_unpark_destination text[], p_unpark_partition integer[], OUT fenced boolean, OUT epoch uuid, OUT unparked boolean[]) RETURNS record
    LANGUAGE plpgsql
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
    v_only_cursor constant bool := cardinality(p_park_lane) + cardinality(p_spill_lane) + cardinality(p_drained_lane)
        + cardinality(p_dead_lane) + cardinality(p_unpark_lane) = 0;
begin
    perform pg_advisory_xact_lock_shared("corelane".wh_lock_class(3), p_incarnation);

    -- A later statement than the lock.
    select (select e.token from "corelane".wh_epoch e),
        not exists (select from "corelane".wh_instance i where i.number = p_incarnation and i.state = 0)
        or (not v_only_cursor and exists (
            select
            from unnest(p_park_partition || p_spill_partition || p_drained_partition || p_dead_partition
                || p_unpark_partition) w(partition)
            left join "corelane".wh_partition p on p.partition = w.partition
            where p.owner is distinct from p_incarnation))
    into epoch, fenced;
    if fenced then
        return;
    end if;
    if epoch is null then
        epoch := "corelane".wh_epoch_token();
    end if;
    unparked := '{}';
    if p_epoch <> epoch then
        return;
    end if;

    if v_only_cursor then
        perform set_config('synchronous_commit', 'off', true);
    else
        if cardinality(p_spill_lane) > 0 then
            -- A message of wh_outbox that somebody has deleted is kept without its body: whoever drains the lane finds
            -- it missing, and buries it. Refused, it would hold up every outcome of the shard.
            insert into "corelane".wh_parked_reference (stream_seq, version, position, span_id, stored_at,
                lane_id, stream_id, message_id, correlation_id, causation_id, trace_id, partition, trace_flags,
                destination, type_name, content_type, metadata, payload)
            select distinct on (s.lane_id, s.destination, s.stream_seq) s.stream_seq, s.version, o.position, o.span_id,
                o.stored_at, s.lane_id, o.stream_id, o.message_id, o.correlation_id, o.causation_id, o.trace_id,
                s.partition, o.trace_flags, s.destination, o.type_name, o.content_type, o.metadata, o.payload
            from unnest(p_spill_lane, p_spill_destination, p_spill_partition, p_spill_seq, p_spill_version)
                s(lane_id, destination, partition, stream_seq, version)
            left join "corelane".wh_outbox o
                on s.version = 0 and o.stream_seq = s.stream_seq
                and o.lane_id = any (case s.stream_seq when 1 then array[s.lane_id, "corelane".wh_lane(s.lane_id)]
                    else array[s.lane_id] end)
                and (o.lane_id = s.lane_id or o.stream_id is null and o.message_id = s.lane_id)
            where not exists (
                select from "corelane".wh_parked_reference k
                where k.lane_id = s.lane_id and k.destination = s.destination and k.stream_seq = s.stream_seq)
            order by s.lane_id, s.destination, s.stream_seq, o.lane_id <> s.lane_id
            on conflict do nothing;
        end if;

        if cardinality(p_park_lane) > 0 then
            insert into "corelane".wh_parked as k (stream_seq, due, lane_id, partition, attempts, reason, error_cut,
                destination, error)
            select distinct on (n.lane_id, n.destination) n.stream_seq,
                clock_timestamp() + n.due_in_ms * interval '1 millisecond', n.lane_id, n.partition, n.attempts,
                n.reason, n.error_cut, n.destination, n.error
            from unnest(p_park_lane, p_park_destination, p_park_partition, p_park_seq, p_park_attempts, p_park_reason,
                p_park_error, p_park_error_cut, p_park_due_in_ms) with ordinality
                n(lane_id, destination, partition, stream_seq, attempts, reason, error, error_cut, due_in_ms, turn)
            order by n.lane_id, n.destination, n.turn desc
            on conflict (lane_id, destination) do update
            set stream_seq = excluded.stream_seq, due = excluded.due, partition = excluded.partition,
                attempts = excluded.attempts, reason = excluded.reason, error_cut = excluded.error_cut,
                error = excluded.error;
        end if;

        if cardinality(p_spill_lane) > 0 then
            -- A kept reference never stands without its lane's row, or the next owner would not find it: an unpark
            -- of an earlier load may have been committed since.
            insert into "corelane".wh_parked (stream_seq, due, lane_id, partition, attempts, reason, error_cut,
                destination, error)
            select distinct on (s.lane_id, s.destination) s.stream_seq, clock_timestamp(), s.lane_id, s.partition, 0, 0,
                false, s.destination, ''
            from unnest(p_spill_lane, p_spill_destination, p_spill_partition, p_spill_seq)
                s(lane_id, destination, partition, stream_seq)
            order by s.lane_id, s.destination, s.stream_seq
            on conflict (lane_id, destination) do nothing;
        end if;

        if cardinality(p_drained_lane) > 0 then
            delete from "corelane".wh_parked_reference k
            using unnest(p_drained_lane, p_drained_destination, p_drained_seq) d(lane_id, destination, stream_seq)
            where k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq;
        end if;

        if cardinality(p_dead_lane) > 0 then
            -- The body of an event stays where it is; that of another message comes along, from its segment or from
            -- beside the log.
            insert into "corelane".wh_dead_letter (stream_seq, version, position, span_id, stored_at, lane_id,
                stream_id, message_id, correlation_id, causation_id, trace_id, partition, attempts, trace_flags,
                reason, error_cut, destination, error, error_fingerprint, type_name, content_type, metadata, payload)
            select distinct on (d.lane_id, d.destination, d.stream_seq) d.stream_seq, d.version,
                coalesce(e.position, o.position, k.position), coalesce(e.span_id, o.span_id, k.span_id),
                coalesce(e.stored_at, o.stored_at, k.stored_at), d.lane_id,
                coalesce(e.stream_id, o.stream_id, k.stream_id), coalesce(e.message_id, o.message_id, k.message_id),
                coalesce(e.correlation_id, o.correlation_id, k.correlation_id),
                coalesce(e.causation_id, o.causation_id, k.causation_id),
                coalesce(e.trace_id, o.trace_id, k.trace_id), d.partition, d.attempts,
                coalesce(e.trace_flags, o.trace_flags, k.trace_flags), d.reason, d.error_cut, d.destination, d.error,
                md5(regexp_replace(left(d.error, 512), '[0-9a-fA-F]{8,}|[0-9]+', '#', 'g')),
                coalesce(e.type_name, o.type_name, k.type_name),
                coalesce(e.content_type, o.content_type, k.content_type),
                coalesce(o.metadata, k.metadata), coalesce(o.payload, k.payload)
            from unnest(p_dead_lane, p_dead_destination, p_dead_partition, p_dead_seq, p_dead_version,
                p_dead_attempts, p_dead_reason, p_dead_error, p_dead_error_cut) with ordinality
                d(lane_id, destination, partition, stream_seq, version, attempts, reason, error, error_cut, turn)
            left join "corelane".wh_event_store e
                on d.version > 0 and e.stream_id = d.lane_id and e.version = d.version
            left join "corelane".wh_outbox o
                on d.version = 0 and o.stream_seq = d.stream_seq
                and o.lane_id = any (case d.stream_seq when 1 then array[d.lane_id, "corelane".wh_lane(d.lane_id)]
                    else array[d.lane_id] end)
                and (o.lane_id = d.lane_id or o.stream_id is null and o.message_id = d.lane_id)
            left join "corelane".wh_parked_reference k
                on d.version = 0 and k.lane_id = d.lane_id and k.destination = d.destination
                and k.stream_seq = d.stream_seq
            order by d.lane_id, d.destination, d.stream_seq, d.turn, o.lane_id <> d.lane_id
            on conflict (lane_id, destination, stream_seq) do nothing;
            delete from "corelane".wh_parked_reference k
            using unnest(p_dead_lane, p_dead_destination, p_dead_seq) d(lane_id, destination, stream_seq)
            where k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq;
        end if;

        if cardinality(p_unpark_lane) > 0 then
            delete from "corelane".wh_parked k
            using unnest(p_unpark_lane, p_unpark_destination) u(lane_id, destination)
            where k.lane_id = u.lane_id and k.destination = u.destination
                and not exists (
                    select from "corelane".wh_parked_reference r
                    where r.lane_id = u.lane_id and r.destination = u.destination);
            select array_agg(not exists (
                    select from "corelane".wh_parked k
                    where k.lane_id = u.lane_id and k.destination = u.destination) order by u.turn)
            into unparked
            from unnest(p_unpark_lane, p_unpark_destination) with ordinality u(lane_id, destination, turn);
        end if;
    end if;

    if p_cursor is not null then
        insert into "corelane".wh_cursor (ownership, incarnation, shard, resolved)
        values (p_ownership, p_incarnation, p_shard, p_cursor);
    end if;
end
$$;

CREATE FUNCTION corelane.store_outbox_messages(message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], event_flags boolean[], destinations text[], reference_messages integer[] DEFAULT NULL::integer[], reference_destinations text[] DEFAULT NULL::text[], correlation_ids uuid[] DEFAULT NULL::uuid[], causation_ids uuid[] DEFAULT NULL::uuid[], trace_ids uuid[] DEFAULT NULL::uuid[], span_ids bigint[] DEFAULT NULL::bigint[], trace_flags smallint[] DEFAULT NULL::smallint[], content_types text[] DEFAULT NULL::text[], metadata bytea[] DEFAULT NULL::bytea[], dues timestamp with time zone[] DEFAULT NULL::timestamp with time zone[]) RETURNS TABLE(message_id uuid, partition integer, stream_seq bigint, version bigint, "position" bigint)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_partition_count int4;
    v_many bool;
begin
    perform wh_check_messages(message_ids, stream_ids, type_names, payloads, event_flags, destinations,
        reference_messages, reference_destinations, correlation_ids, causation_ids, trace_ids, span_ids, trace_flags,
        content_types, metadata, dues);
    select i.partition_count into strict v_partition_count from wh_installation i;

    select count(*) > 256 into v_many from (
        select distinct s.id from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null limit 257
    ) s;
    if v_many then
        perform pg_advisory_xact_lock(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition
            from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null
            order by 1
        ) p;
    else
        perform pg_advisory_xact_lock_shared(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition
            from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null
            order by 1
        ) p;
        perform pg_advisory_xact_lock(wh_lock_class(2), s.key) from (
            select distinct wh_stream_key(s.id) as key
            from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null
            order by 1
        ) s;
    end if;

    -- Later statements than the locks.
    return query select * from wh_store_locked(v_partition_count, message_ids, stream_ids, type_names, payloads,
        event_flags, destinations, reference_messages, reference_destinations, correlation_ids, causation_ids,
        trace_ids, span_ids, trace_flags, content_types, metadata, dues);
end
$$;

CREATE FUNCTION corelane.store_shard_messages(p_incarnation integer, p_shard smallint, p_flush bigint, p_ownership bigint, p_read_xmax bigint, p_read_listed bigint[], p_epoch uuid, p_partitions integer[], p_known boolean, p_events integer, p_messages integer, p_kind smallint[], p_stream_seq bigint[], p_version bigint[], p_span_id bigint[], p_lane_id uuid[], p_message_id uuid[], p_correlation_id uuid[], p_causation_id uuid[], p_trace_id uuid[], p_partition integer[], p_trace_flags smallint[], p_type_name text[], p_content_type text[], p_metadata bytea[], p_payload bytea[], p_due timestamp with time zone[], p_scheduled_destination_end integer[], p_scheduled_destination text[], p_log_end integer[], p_log_owned boolean[], p_log_dictionary_end integer[], p_dictionary text[], p_log_row integer[], p_log_destination smallint[], OUT busy uuid[], OUT xid bigint, OUT epoch uuid, OUT "position" bigint, OUT owned boolean, OUT is_foreign boolean, OUT last_seq bigint[], OUT last_version bigint[]) RETURNS record
    LANGUAGE plpgsql
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
#variable_conflict use_column
declare
    v_partition_class constant int4 := "corelane".wh_lock_class(1);
    v_contested int4[];
    v_refused int4[];
    v_segment int2;
    v_owned bool;
    v_foreign bool;
    v_given_up bool;
    v_floor int8 := 0;
    v_xid int8;
    v_position int8;
    v_log_partition int4[];
    v_log_seq int8[];
    v_log_version int8[];
    v_log_lane uuid[];
    v_begin int4 := 1;
    v_name int4 := 1;
begin
    perform pg_advisory_xact_lock_shared("corelane".wh_lock_class(3), p_incarnation);
    perform pg_advisory_xact_lock("corelane".wh_lock_class(7), "corelane".wh_flush_key(p_incarnation, p_shard));
    perform pg_advisory_xact_lock("corelane".wh_lock_class(5), p) from unnest(p_partitions) p;

    select array_agg(p) into v_refused
    from unnest(p_partitions) p
    where not pg_try_advisory_xact_lock(v_partition_class, p);
    if v_refused is not null then
        -- Somebody works in these partitions: find out on which of our streams. Rows without a stream meet nobody.
        v_contested := v_refused;
        select array_agg(p) into v_refused
        from unnest(v_contested) p
        where not pg_try_advisory_xact_lock_shared(v_partition_class, p);
        select array_agg(s.id) into busy
        from (
            select s.id, coalesce(s.partition = any (v_refused), false) as refused,
                row_number() over (order by "corelane".wh_stream_key(s.id)) as turn
            from (
                select r.lane_id as id, min(r.partition) as partition
                from unnest(p_kind, p_lane_id, p_partition) r(kind, lane_id, partition)
                where coalesce(r.kind, 1) in (0, 1) and r.partition = any (v_contested)
                group by r.lane_id
            ) s
        ) s
        where s.refused or s.turn > 256
            or not pg_try_advisory_xact_lock("corelane".wh_lock_class(2), "corelane".wh_stream_key(s.id));
        if busy is not null then
            return;
        end if;
    end if;

    -- A later statement than the locks.
    select (select e.token from "corelane".wh_epoch e),
        coalesce((select i.state = 0 and i.ownership = p_ownership from "corelane".wh_instance i
            where i.number = p_incarnation), false),
        (select s.current from "corelane".wh_segment s),
        exists (select from "corelane".wh_flush_given_up g
            where g.incarnation = p_incarnation and g.shard = p_shard and g.flush_number >= p_flush),
        exists (select from "corelane".wh_log l where not l.owned and l.xid >= p_read_xmax)
            or (cardinality(p_read_listed) > 0
                and exists (select from "corelane".wh_log l where not l.owned and l.xid = any (p_read_listed)))
    into epoch, v_owned, v_segment, v_given_up, v_foreign;
    if v_given_up then
        raise exception 'flush % was looked up, not found, and given up', p_flush using errcode = 'CL004';
    end if;
    owned := v_owned;
    if epoch is null then
        epoch := "corelane".wh_epoch_token();
    end if;
    v_foreign := v_foreign or coalesce(p_epoch <> epoch, false);
    is_foreign := v_foreign;

    if not p_known or not v_owned or v_foreign then
        with r as materialized (
            select generate_series(1, cardinality(p_lane_id)) as turn, unnest(p_kind) as kind,
                unnest(p_lane_id) as lane_id, unnest(p_stream_seq) as seq, unnest(p_version) as version
        ),
        s as materialized (
            select r.lane_id as id, min(r.turn) as turn, min(r.seq) - 1 as assumed_seq,
                min(r.version) filter (where r.version > 0) - 1 as assumed_version
            from r where coalesce(r.kind, 1) in (0, 1) group by r.lane_id
        ),
        n as materialized (
            select s.id, s.turn, s.assumed_seq, s.assumed_version, coalesce(e.version, 0) as version,
                greatest(coalesce(e.stream_seq, 0), o.stream_seq, coalesce(c.last_seq, 0)) as seq
            from s
            left join lateral (
                select e.stream_seq, e.version from "corelane".wh_event_store e
                where e.stream_id = s.id order by e.version desc limit 1
            ) e on true
            cross join lateral (
                select greatest(
                    (select o.stream_seq from "corelane".wh_outbox_0 o where o.lane_id = s.id
                        order by o.stream_seq desc limit 1),
                    (select o.stream_seq from "corelane".wh_outbox_1 o where o.lane_id = s.id
                        order by o.stream_seq desc limit 1),
                    (select o.stream_seq from "corelane".wh_outbox_2 o where o.lane_id = s.id
                        order by o.stream_seq desc limit 1), 0) as stream_seq
            ) o
            left join "corelane".wh_stream c on c.stream_id = s.id
        ),
        numbered as (
            select r.turn, r.seq + coalesce(n.seq - n.assumed_seq, 0) as seq,
                case when r.version > 0 then r.version + n.version - n.assumed_version else 0 end as version
            from r left join n on n.id = r.lane_id and coalesce(r.kind, 1) in (0, 1)
        )
        select coalesce(found.seq, '{}'), coalesce(found.version, '{}'), rows.seq, rows.version
        into last_seq, last_version, p_stream_seq, p_version
        from (
            select array_agg(n.seq order by n.turn) as seq, array_agg(n.version order by n.turn) as version from n
        ) found, (
            select array_agg(d.seq order by d.turn) as seq, array_agg(d.version order by d.turn) as version
            from numbered d
        ) rows;
    end if;

    -- In this order: see wh_draw_position.
    if pg_current_xact_id_if_assigned() is null then
        v_floor := coalesce(pg_sequence_last_value('"corelane".wh_position'), 0);
    end if;
    v_xid := pg_current_xact_id()::text::int8;
    v_position := nextval('"corelane".wh_position');
    xid := v_xid;
    "position" := v_position;

    if p_events > 0 then
        insert into "corelane".wh_event_store (position, stream_seq, version, xid, span_id, stored_at, stream_id,
            message_id, correlation_id, causation_id, trace_id, partition, trace_flags, type_name, content_type,
            metadata, payload)
        select v_position + r.turn - 1, r.stream_seq, r.version, v_xid, r.span_id, now(), r.lane_id,
            r.message_id, r.correlation_id, r.causation_id, r.trace_id, r.partition, r.trace_flags, r.type_name,
            r.content_type, r.metadata, r.payload
        from (
            select generate_series(1, cardinality(p_lane_id)) as turn, unnest(p_kind) as kind,
                unnest(p_stream_seq) as stream_seq, unnest(p_version) as version, unnest(p_span_id) as span_id,
                unnest(p_lane_id) as lane_id, unnest(p_message_id) as message_id,
                unnest(p_correlation_id) as correlation_id, unnest(p_causation_id) as causation_id,
                unnest(p_trace_id) as trace_id, unnest(p_partition) as partition,
                unnest(p_trace_flags) as trace_flags, unnest(p_type_name) as type_name,
                unnest(p_content_type) as content_type, unnest(p_metadata) as metadata, unnest(p_payload) as payload
        ) r
        where coalesce(r.kind, 1) = 1;
    end if;
    if p_messages > 0 then
        insert into "corelane".wh_outbox (position, stream_seq, xid, span_id, stored_at, lane_id, stream_id,
            message_id, correlation_id, causation_id, trace_id, partition, trace_flags, segment, type_name,
            content_type, metadata, payload)
        select v_position + r.turn - 1, r.stream_seq, v_xid, r.span_id, now(), r.lane_id,
            case when r.kind = 0 then r.lane_id end,
            r.message_id, r.correlation_id, r.causation_id, r.trace_id, r.partition, r.trace_flags, v_segment,
            r.type_name, r.content_type, r.metadata, r.payload
        from (
            select generate_series(1, cardinality(p_lane_id)) as turn, unnest(p_kind) as kind,
                unnest(p_stream_seq) as stream_seq, unnest(p_span_id) as span_id, unnest(p_lane_id) as lane_id,
                unnest(p_message_id) as message_id, unnest(p_correlation_id) as correlation_id,
                unnest(p_causation_id) as causation_id, unnest(p_trace_id) as trace_id,
                unnest(p_partition) as partition, unnest(p_trace_flags) as trace_flags,
                unnest(p_type_name) as type_name, unnest(p_content_type) as content_type,
                unnest(p_metadata) as metadata, unnest(p_payload) as payload
        ) r
        where r.kind in (0, 2);
    end if;
    if p_due is not null then
        insert into "corelane".wh_scheduled (due, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id,
            span_id, partition, trace_flags, type_name, content_type, metadata, payload, destination)
        select r.due, r.lane_id, case when r.kind = 4 then r.lane_id end, r.message_id, r.correlation_id,
            r.causation_id, r.trace_id, r.span_id, r.partition, r.trace_flags, r.type_name, r.content_type,
            r.metadata, r.payload, p_scheduled_destination[r.destination_begin + 1 : r.destination_end]
        from (
            select r.*, coalesce(lag(r.destination_end) over (order by r.turn), 0) as destination_begin
            from unnest(p_kind, p_due, p_scheduled_destination_end, p_span_id, p_lane_id, p_message_id,
                p_correlation_id, p_causation_id, p_trace_id, p_partition, p_trace_flags, p_type_name, p_content_type,
                p_metadata, p_payload)
                with ordinality r(kind, due, destination_end, span_id, lane_id, message_id, correlation_id,
                causation_id, trace_id, partition, trace_flags, type_name, content_type, metadata, payload, turn)
        ) r
        where r.kind >= 4;
    end if;

    if p_log_row is null then
        v_log_partition := p_partition;
        v_log_seq := p_stream_seq;
        v_log_version := p_version;
        v_log_lane := p_lane_id;
    else
        select coalesce(array_agg(p_partition[r.row] order by r.turn), '{}'),
            coalesce(array_agg(p_stream_seq[r.row] order by r.turn), '{}'),
            coalesce(array_agg(p_version[r.row] order by r.turn), '{}'),
            coalesce(array_agg(p_lane_id[r.row] order by r.turn), '{}')
        into v_log_partition, v_log_seq, v_log_version, v_log_lane
        from unnest(p_log_row) with ordinality r(row, turn);
    end if;
    if p_log_destination is null then
        p_log_destination := array_fill(1::int2, array[cardinality(v_log_lane)]);
    end if;
    -- At least one row, so that find_flush finds the flush.
    for i in 1..cardinality(p_log_end) loop
        if v_segment = 0 then
            insert into "corelane".wh_log_0 (position, xid, floor, flush_number, incarnation, shard, segment, owned,
                partition, destination_index, stream_seq, version, lane_id, destination)
            values (v_position + i - 1, v_xid, v_floor, p_flush, p_incarnation, p_shard, v_segment,
                v_owned and p_log_owned[i], v_log_partition[v_begin : p_log_end[i]],
                p_log_destination[v_begin : p_log_end[i]], v_log_seq[v_begin : p_log_end[i]],
                v_log_version[v_begin : p_log_end[i]], v_log_lane[v_begin : p_log_end[i]],
                p_dictionary[v_name : p_log_dictionary_end[i]]);
        elsif v_segment = 1 then
            insert into "corelane".wh_log_1 (position, xid, floor, flush_number, incarnation, shard, segment, owned,
                partition, destination_index, stream_seq, version, lane_id, destination)
            values (v_position + i - 1, v_xid, v_floor, p_flush, p_incarnation, p_shard, v_segment,
                v_owned and p_log_owned[i], v_log_partition[v_begin : p_log_end[i]],
                p_log_destination[v_begin : p_log_end[i]], v_log_seq[v_begin : p_log_end[i]],
                v_log_version[v_begin : p_log_end[i]], v_log_lane[v_begin : p_log_end[i]],
                p_dictionary[v_name : p_log_dictionary_end[i]]);
        else
            insert into "corelane".wh_log_2 (position, xid, floor, flush_number, incarnation, shard, segment, owned,
                partition, destination_index, stream_seq, version, lane_id, destination)
            values (v_position + i - 1, v_xid, v_floor, p_flush, p_incarnation, p_shard, v_segment,
                v_owned and p_log_owned[i], v_log_partition[v_begin : p_log_end[i]],
                p_log_destination[v_begin : p_log_end[i]], v_log_seq[v_begin : p_log_end[i]],
                v_log_version[v_begin : p_log_end[i]], v_log_lane[v_begin : p_log_end[i]],
                p_dictionary[v_name : p_log_dictionary_end[i]]);
        end if;
        v_begin := p_log_end[i] + 1;
        v_name := p_log_dictionary_end[i] + 1;
    end loop;
end
$$;

CREATE FUNCTION corelane.store_shard_messages(p_incarnation integer, p_shard smallint, p_flush bigint, p_ownership bigint, p_read_xmax bigint, p_read_listed bigint[], p_epoch uuid, p_partitions integer[], p_stream_id uuid[], p_stream_partition integer[], p_stream_last_seq bigint[], p_stream_last_version bigint[], p_known boolean, p_events integer, p_messages integer, p_kind smallint[], p_row_stream integer[], p_stream_seq bigint[], p_version bigint[], p_span_id bigint[], p_lane_id uuid[], p_message_id uuid[], p_correlation_id uuid[], p_causation_id uuid[], p_trace_id uuid[], p_partition integer[], p_trace_flags smallint[], p_type_name text[], p_content_type text[], p_metadata bytea[], p_payload bytea[], p_due timestamp with time zone[], p_scheduled_destination_end integer[], p_scheduled_destination text[], p_log_end integer[], p_log_owned boolean[], p_log_dictionary_end integer[], p_dictionary text[], p_log_partition integer[], p_log_destination smallint[], p_log_seq bigint[], p_log_version bigint[], p_log_lane uuid[], p_log_stream integer[], OUT busy uuid[], OUT xid bigint, OUT epoch uuid, OUT "position" bigint, OUT owned boolean, OUT is_foreign boolean, OUT last_seq bigint[], OUT last_version bigint[]) RETURNS record
    LANGUAGE sql
    AS $$
    select s.* from "corelane".store_shard_messages(p_incarnation, p_shard, p_flush, p_ownership, p_read_xmax,
        p_read_listed, p_epoch, p_partitions, p_known, p_events, p_messages, p_kind, p_stream_seq, p_version, p_span_id,
        p_lane_id, p_message_id, p_correlation_id, p_causation_id, p_trace_id, p_partition, p_trace_flags, p_type_name,
        p_content_type, p_metadata, p_payload, p_due, p_scheduled_destination_end, p_scheduled_destination, p_log_end,
        p_log_owned, p_log_dictionary_end, p_dictionary,
        (select coalesce(array_agg(r.turn::int4 order by l.turn), '{}')
            from unnest(p_log_lane, p_log_seq) with ordinality l(lane_id, seq, turn)
            join unnest(p_lane_id, p_stream_seq, p_kind) with ordinality r(lane_id, seq, kind, turn)
                on r.lane_id = l.lane_id and r.seq = l.seq and r.kind < 4),
        p_log_destination) s
$$;

CREATE FUNCTION corelane.take_partitions(p_incarnation integer, p_partitions integer[] DEFAULT NULL::integer[]) RETURNS TABLE(ownership bigint, partition integer[], fence bigint[])
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_ownership int8;
begin
    select i.ownership into v_ownership
    from wh_instance i
    where i.number = p_incarnation and i.state = 0 and i.lease_until > clock_timestamp()
    for update;
    if not found then
        return;
    end if;
    update wh_partition p
    set owner = p_incarnation, fence = p.fence + 1, ownership = v_ownership + 1
    from (
        select f.partition from wh_partition f
        where f.owner is null and (p_partitions is null or f.partition = any (p_partitions))
        order by f.partition
        for update skip locked
    ) f
    where p.partition = f.partition;
    if found then
        v_ownership := v_ownership + 1;
        update wh_instance i set ownership = v_ownership where i.number = p_incarnation;
    end if;
    return query
    select v_ownership, coalesce(array_agg(p.partition order by p.partition), '{}'),
        coalesce(array_agg(p.fence order by p.partition), '{}')
    from wh_partition p
    where p.owner = p_incarnation;
end
$$;

CREATE FUNCTION corelane.wait_for_end(p_incarnation integer) RETURNS boolean
    LANGUAGE sql
    AS $$
    select pg_advisory_xact_lock_shared("corelane".wh_lock_class(4), p_incarnation) is not null
$$;

CREATE FUNCTION corelane.wh_carry_numbers(p_segment smallint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
declare
    v_last uuid;
    v_count int4;
begin
    with lane as (
        -- Rows without a stream have a lane of their own and nothing to carry.
        select o.lane_id, max(o.stream_seq) as last_seq
        from wh_outbox o
        where o.segment = p_segment and o.stream_id is not null
            and o.lane_id > (select r.carried_to from wh_rotation r where r.segment = p_segment)
        group by o.lane_id
        order by o.lane_id
        limit 20000
    ), carried as (
        insert into wh_stream (last_seq, stream_id)
        select l.last_seq, l.lane_id from lane l
        on conflict (stream_id) do update set last_seq = excluded.last_seq
        where wh_stream.last_seq < excluded.last_seq
    )
    select (array_agg(l.lane_id order by l.lane_id desc))[1], count(*) into v_last, v_count from lane l;
    update wh_rotation r set carried_to = coalesce(v_last, r.carried_to), is_carried = v_count < 20000
    where r.segment = p_segment;
    return v_count < 20000;
end
$$;

CREATE FUNCTION corelane.wh_channel() RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select 'corelane_' || '"corelane"'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.text
$$;

CREATE FUNCTION corelane.wh_check_messages(message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], event_flags boolean[], destinations text[], reference_messages integer[], reference_destinations text[], correlation_ids uuid[], causation_ids uuid[], trace_ids uuid[], span_ids bigint[], trace_flags smallint[], content_types text[], metadata bytea[], dues timestamp with time zone[]) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_count constant int4 := cardinality(message_ids);
    v_array text;
    v_length int4;
    v_element int8;
    v_message uuid;
    v_problem text;
begin
    if v_count is null then
        raise exception 'message_ids is null' using errcode = '22023';
    end if;
    select a.name, a.length into v_array, v_length
    from (values
        ('stream_ids', coalesce(cardinality(stream_ids), -1)), ('type_names', coalesce(cardinality(type_names), -1)),
        ('payloads', coalesce(cardinality(payloads), -1)), ('event_flags', coalesce(cardinality(event_flags), -1)),
        ('destinations', coalesce(cardinality(destinations), -1)), ('correlation_ids', cardinality(correlation_ids)),
        ('causation_ids', cardinality(causation_ids)), ('trace_ids', cardinality(trace_ids)),
        ('span_ids', cardinality(span_ids)), ('trace_flags', cardinality(trace_flags)),
        ('content_types', cardinality(content_types)), ('metadata', cardinality(metadata)), ('dues', cardinality(dues))
    ) a(name, length)
    where a.length <> v_count
    limit 1;
    if v_array is not null then
        raise exception '% has % elements, message_ids has %', v_array,
            case when v_length = -1 then 'no' else v_length::text end, v_count using errcode = '22023';
    end if;
    if coalesce(cardinality(reference_messages), 0) <> coalesce(cardinality(reference_destinations), 0) then
        raise exception 'reference_messages has % elements, reference_destinations has %',
            coalesce(cardinality(reference_messages), 0), coalesce(cardinality(reference_destinations), 0)
            using errcode = '22023';
    end if;

    select m.element, m.message_id, p.problem into v_element, v_message, v_problem
    from unnest(message_ids, stream_ids, type_names, payloads, event_flags, destinations, content_types, metadata, dues)
        with ordinality m(message_id, stream_id, type_name, payload, is_event, destination, content_type, metadata, due,
        element)
    cross join lateral (
        select case
            when m.message_id is null then 'the message id is null'
            when m.message_id = '00000000-0000-0000-0000-000000000000' then 'the nil UUID is not a message id'
            when m.stream_id = '00000000-0000-0000-0000-000000000000' then
                'the nil UUID is not a stream id: give null for a message without order, or the stream''s real id'
            when m.type_name is null then 'the type name is null'
            when octet_length(m.type_name) not between 1 and 255 then
                format('the type name has %s bytes, allowed are 1 to 255', octet_length(m.type_name))
            when m.payload is null then 'the payload is null (an empty one is ''\x'')'
            when octet_length(m.payload) > 67108864 then
                format('the payload has %s bytes, allowed are 67108864', octet_length(m.payload))
            when m.is_event is null then 'whether it is an event is null'
            when octet_length(m.destination) not between 1 and 255 then
                format('the destination has %s bytes, allowed are 1 to 255', octet_length(m.destination))
            when octet_length(m.content_type) not between 1 and 255 then
                format('the content type has %s bytes, allowed are 1 to 255', octet_length(m.content_type))
            when octet_length(m.metadata) > 65536 then
                format('the metadata have %s bytes, allowed are 65536', octet_length(m.metadata))
            when m.due is not null and m.is_event then
                'an event cannot be scheduled: schedule a command that appends it'
            when not isfinite(m.due) then 'the due time is not finite'
        end as problem
    ) p
    where p.problem is not null
    order by m.element
    limit 1;
    if v_problem is not null then
        raise exception 'element % (message %): %', v_element, coalesce(v_message::text, 'null'), v_problem
            using errcode = '22023';
    end if;

    if cardinality(reference_messages) > 0 then
        select r.element, p.problem into v_element, v_problem
        from unnest(reference_messages, reference_destinations) with ordinality r(message, destination, element)
        cross join lateral (
            select case
                when r.message is null or r.message not between 1 and v_count then
                    format('there is no message %s, the call has %s', coalesce(r.message::text, 'null'), v_count)
                when r.destination is null then 'the destination is null'
                when octet_length(r.destination) not between 1 and 255 then
                    format('the destination has %s bytes, allowed are 1 to 255', octet_length(r.destination))
            end as problem
        ) p
        where p.problem is not null
        order by r.element
        limit 1;
        if v_problem is not null then
            raise exception 'reference % : %', v_element, v_problem using errcode = '22023';
        end if;
        select r.message, count(*) into v_element, v_length
        from unnest(reference_messages) r(message) group by r.message having count(*) > 63 order by r.message limit 1;
        if v_element is not null then
            raise exception 'element % (message %): it has % destinations, allowed are 64', v_element,
                message_ids[v_element], v_length + 1 using errcode = '22023';
        end if;
    end if;
end
$$;

CREATE FUNCTION corelane.wh_check_resolved(p_segment smallint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
declare
    v_low int8;
    v_to int8;
    v_done bool;
begin
    -- As texts, because snapshots cannot be compared: there are a few, and many partitions.
    select min(pg_snapshot_xmin(wh_snapshot_union(s.base::pg_snapshot, s.cursor::pg_snapshot))::text::int8) into v_low
    from (select distinct r.base::text as base, r.cursor::text as cursor from wh_resolved r) s;
    if not exists (select from wh_log l where l.segment = p_segment and l.xid >= v_low) then
        v_done := true;
        select r.resolved_to into v_to from wh_rotation r where r.segment = p_segment;
    else
        with page as (
            select l.position, l.xid, l.partition
            from (
                select l.*, sum(cardinality(l.partition)) over (order by l.position) - cardinality(l.partition) as before
                from (
                    select l.position, l.xid, l.partition
                    from wh_log l
                    where l.segment = p_segment
                        and l.position > (select r.resolved_to from wh_rotation r where r.segment = p_segment)
                    order by l.position
                    limit 5000
                ) l
            ) l
            where l.before < 100000
        ), resolved as materialized (
            select r.partition, r.base, r.cursor from wh_resolved r
        ), stop as (
            select min(p.position) as position
            from page p
            cross join lateral unnest(p.partition) u(partition)
            join resolved r on r.partition = u.partition
            where p.xid >= v_low
                and not pg_visible_in_snapshot(p.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(p.xid::text::xid8, r.cursor)
        )
        select max(p.position) filter (where s.position is null or p.position < s.position),
            bool_and(s.position is null) and not exists (
                select from wh_log l where l.segment = p_segment and l.position > (select max(p.position) from page p))
        into v_to, v_done
        from page p, stop s;
        v_done := coalesce(v_done, true);
    end if;
    update wh_rotation r set resolved_to = coalesce(v_to, r.resolved_to), is_resolved = v_done
    where r.segment = p_segment and (r.resolved_to, r.is_resolved) is distinct from (coalesce(v_to, r.resolved_to), v_done);
    return v_done;
end
$$;

CREATE FUNCTION corelane.wh_draw_position(OUT floor bigint, OUT xid bigint, OUT "position" bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    floor := 0;
    if pg_current_xact_id_if_assigned() is null then
        floor := coalesce(pg_sequence_last_value('"corelane".wh_position'), 0);
    end if;
    xid := pg_current_xact_id()::text::int8;
    "position" := nextval('"corelane".wh_position');
end
$$;

CREATE FUNCTION corelane.wh_epoch_token() RETURNS uuid
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_token uuid;
begin
    select e.token into v_token from wh_epoch e;
    if v_token is null then
        insert into wh_epoch default values on conflict (only_row) do nothing;
        -- A later statement: sees the row of the maker that was waited for.
        select e.token into strict v_token from wh_epoch e;
    end if;
    return v_token;
end
$$;

CREATE FUNCTION corelane.wh_flush_key(incarnation integer, shard integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN (((((incarnation)::bigint << 10) | (shard)::bigint) & (2147483647)::bigint))::integer;

CREATE FUNCTION corelane.wh_free_partitions(p_incarnation integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
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

CREATE FUNCTION corelane.wh_lane(message_id uuid) RETURNS uuid
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select pg_catalog.encode(pg_catalog.set_byte(pg_catalog.uuid_send(message_id), 8,
        pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 8) # 128), 'hex')::pg_catalog.uuid
$$;

CREATE FUNCTION corelane.wh_lock_class(kind integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select ('"corelane"'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.int8 * 8 + kind)::pg_catalog.bit(32)::pg_catalog.int4
$$;

CREATE FUNCTION corelane.wh_note_flushes(p_segment smallint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
declare
    v_to int8;
    v_count int4;
begin
    with page as (
        select l.position, l.xid, l.flush_number, l.incarnation, l.shard, l.owned
        from wh_log l
        where l.segment = p_segment
            and l.position > (select r.noted_to from wh_rotation r where r.segment = p_segment)
        order by l.position
        limit 20000
    ), newest as (
        select p.incarnation, p.shard, max(p.flush_number) as flush_number
        from page p
        where p.incarnation in (select i.number from wh_instance i where i.state = 0)
        group by p.incarnation, p.shard
    ), noted as (
        insert into wh_flush_truncated as t (flush_number, xid, position, incarnation, shard, owned)
        select n.flush_number, min(p.xid), min(p.position), n.incarnation, n.shard, bool_and(p.owned)
        from newest n
        join page p using (incarnation, shard, flush_number)
        group by n.incarnation, n.shard, n.flush_number
        -- Several log rows of one flush may stand in two pages.
        on conflict (incarnation, shard) do update
        set flush_number = excluded.flush_number, xid = excluded.xid,
            position = case when t.flush_number = excluded.flush_number
                then least(t.position, excluded.position) else excluded.position end,
            owned = excluded.owned and (t.owned or t.flush_number < excluded.flush_number)
        where t.flush_number <= excluded.flush_number
    )
    select max(p.position), count(*) into v_to, v_count from page p;
    update wh_rotation r set noted_to = coalesce(v_to, r.noted_to), is_noted = v_count < 20000
    where r.segment = p_segment;
    return v_count < 20000;
end
$$;

CREATE FUNCTION corelane.wh_prove_last(streams uuid[], last_seqs bigint[], last_versions bigint[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
begin
    -- A row that was updated since the snapshot fails here with 40001 by itself. Not FOR KEY SHARE: an update of
    -- last_seq does not conflict with it.
    perform from wh_stream c where c.stream_id = any (streams) order by c.stream_id for share;
    insert into wh_stream (last_seq, stream_id)
    select 0, s.id from unnest(streams) s(id)
    where not exists (select from wh_stream c where c.stream_id = s.id);
    insert into wh_event_store (position, stream_seq, version, xid, stored_at, stream_id, message_id, partition,
        type_name, payload)
    select 0, s.last_seq + 1, s.last_version + 1, 0, now(), s.id, s.id, 0, '', ''
    from unnest(streams, last_seqs, last_versions) s(id, last_seq, last_version);
    insert into wh_outbox (position, stream_seq, xid, stored_at, lane_id, message_id, partition, segment, type_name,
        payload)
    select 0, s.last_seq + 1, 0, now(), s.id, s.id, 0, k, '', ''
    from unnest(streams, last_seqs) s(id, last_seq), generate_series(0, 2) k;
    raise exception 'nothing of this stays' using errcode = 'WH000';
exception
    when sqlstate 'WH000' then
        null;
    when unique_violation then
        raise exception 'another transaction has stored on a stream of this call since this one''s snapshot was taken'
            using errcode = '40001', hint = 'Run the transaction again, or use READ COMMITTED.';
end
$$;

CREATE FUNCTION corelane.wh_snapshot_union(a pg_snapshot, b pg_snapshot) RETURNS pg_snapshot
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    with edge as (
        select greatest(pg_snapshot_xmax(a), pg_snapshot_xmax(b)) as xmax
    ), listed as (
        select x from pg_snapshot_xip(a) x where not pg_visible_in_snapshot(x, b)
        union
        select x from pg_snapshot_xip(b) x where not pg_visible_in_snapshot(x, a)
    )
    select (coalesce((select min(x) from listed), (select xmax from edge))::text
        || ':' || (select xmax from edge)::text
        || ':' || coalesce((select string_agg(x::text, ',' order by x) from listed), ''))::pg_snapshot
$$;

CREATE FUNCTION corelane.wh_status() RETURNS TABLE(what text, figure bigint, note text)
    LANGUAGE sql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
    select 'generation', i.generation::int8, format('installed %s, %s partitions', i.created_at::timestamptz(0), i.partition_count)
    from wh_installation i
    union all
    select 'pending', coalesce(sum(p.size), 0)::int8, 'references in the log that no cursor has passed'
    from (
        select count(*) as size
        from wh_log l
        cross join lateral unnest(l.partition) u(partition)
        join wh_resolved r on r.partition = u.partition
        where not pg_visible_in_snapshot(l.xid::text::xid8, r.base)
            and not pg_visible_in_snapshot(l.xid::text::xid8, r.cursor)
    ) p
    union all
    select 'parked', count(*), 'lanes; the longest since ' || min(k.parked_at)::timestamptz(0) from wh_parked k
    union all
    select 'kept_beside', count(*), 'references that wait behind parked heads' from wh_parked_reference
    union all
    select 'dead_letters', count(*), 'the latest at ' || max(d.dead_at)::timestamptz(0) from wh_dead_letter d
    union all
    select 'scheduled', count(*), 'the next due ' || min(s.due)::timestamptz(0) from wh_scheduled s
    union all
    select 'segment', s.current, format('since %s', s.switched_at::timestamptz(0)) from wh_segment s
    union all
    select format('segment_%s_bytes', k), pg_total_relation_size(format('wh_log_%s', k)::regclass)
        + pg_total_relation_size(format('wh_outbox_%s', k)::regclass), null
    from generate_series(0, 2) k
    union all
    select 'partitions_free', count(*), 'nobody publishes for them' from wh_partition p where p.owner is null
    union all
    (select format('instance_%s', i.number), (select count(*) from wh_partition p where p.owner = i.number),
        format('partitions held by %s (%s), lease until %s%s', i.instance_name, i.service_name,
            i.lease_until::timestamptz(0), case when i.lease_until < clock_timestamp() then ', EXPIRED' end)
    from wh_instance i where i.state = 0 order by i.number)
$$;

CREATE FUNCTION corelane.wh_store_locked(partition_count integer, message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], event_flags boolean[], destinations text[], reference_messages integer[], reference_destinations text[], correlation_ids uuid[], causation_ids uuid[], trace_ids uuid[], span_ids bigint[], trace_flags smallint[], content_types text[], metadata bytea[], dues timestamp with time zone[]) RETURNS TABLE(message_id uuid, partition integer, stream_seq bigint, version bigint, "position" bigint)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
#variable_conflict use_column
declare
    v_count constant int4 := cardinality(message_ids);
    v_has_references constant bool := coalesce(cardinality(reference_messages), 0) > 0;
    v_log_messages int4 := 180;
    v_lane uuid[];
    v_partition int4[];
    v_seq int8[];
    v_version int8[];
    v_numbered int8;
    v_events int8;
    v_stream uuid[];
    v_last_seq int8[];
    v_last_version int8[];
    v_floor int8;
    v_xid int8;
    v_draw int8[];
    v_segment int2;
begin
    if v_count = 0 then
        return;
    end if;
    with message as (
        select m.*, row_number() over in_stream as place, count(*) filter (where m.is_event) over in_stream as event_place
        from unnest(message_ids, stream_ids, event_flags, dues) with ordinality m(id, stream_id, is_event, due, turn)
        window in_stream as (partition by m.stream_id, m.due is null order by m.turn rows unbounded preceding)
    ), found as (
        select m.*, case when m.place = 1 and m.stream_id is not null and m.due is null then greatest(
                coalesce((select e.stream_seq from wh_event_store e where e.stream_id = m.stream_id
                    order by e.version desc limit 1), 0),
                coalesce((select o.stream_seq from wh_outbox_0 o where o.lane_id = m.stream_id
                    order by o.stream_seq desc limit 1), 0),
                coalesce((select o.stream_seq from wh_outbox_1 o where o.lane_id = m.stream_id
                    order by o.stream_seq desc limit 1), 0),
                coalesce((select o.stream_seq from wh_outbox_2 o where o.lane_id = m.stream_id
                    order by o.stream_seq desc limit 1), 0),
                coalesce((select c.last_seq from wh_stream c where c.stream_id = m.stream_id), 0)
            ) end as last_seq,
            case when m.place = 1 and m.stream_id is not null and m.due is null then
                coalesce((select e.version from wh_event_store e where e.stream_id = m.stream_id
                    order by e.version desc limit 1), 0) end as last_version
        from message m
    ), numbered as (
        select f.turn, coalesce(f.stream_id, wh_lane(f.id)) as lane_id, coalesce(f.stream_id, f.id) as placed_by,
            f.last_seq, f.last_version, f.stream_id, f.due is null as is_numbered, f.is_event and f.stream_id is not null as is_event,
            case when f.due is not null then 0 when f.stream_id is null then 1
                else max(f.last_seq) over in_stream + f.place end as seq,
            case when f.is_event and f.stream_id is not null then max(f.last_version) over in_stream + f.event_place
                else 0 end as version
        from found f
        window in_stream as (partition by f.stream_id, f.due is null order by f.turn rows unbounded preceding)
    )
    select array_agg(n.lane_id order by n.turn), 
        array_agg(compute_partition(n.placed_by, partition_count) order by n.turn),
        array_agg(n.seq order by n.turn), array_agg(n.version order by n.turn),
        count(*) filter (where n.is_numbered), count(*) filter (where n.is_event),
        array_agg(n.stream_id) filter (where n.last_seq is not null),
        array_agg(n.last_seq) filter (where n.last_seq is not null),
        array_agg(n.last_version) filter (where n.last_seq is not null)
    into v_lane, v_partition, v_seq, v_version, v_numbered, v_events, v_stream, v_last_seq, v_last_version
    from numbered n;

    if v_stream is not null and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        perform wh_prove_last(v_stream, v_last_seq, v_last_version);
    end if;

    if v_numbered < v_count then
        insert into wh_scheduled (due, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id, span_id,
            partition, trace_flags, type_name, content_type, metadata, payload, destination)
        select m.due, m.lane_id, m.stream_id, m.message_id, m.correlation_id, m.causation_id, m.trace_id, m.span_id,
            m.partition, m.trace_flags, m.type_name, m.content_type, m.metadata, m.payload,
            array(select m.destination where m.destination is not null
                union select r.destination from unnest(reference_messages, reference_destinations) r(message, destination)
                where r.message = m.turn)
        from unnest(dues, v_lane, stream_ids, message_ids, correlation_ids, causation_ids, trace_ids, span_ids,
            v_partition, trace_flags, type_names, content_types, metadata, payloads, destinations)
            with ordinality m(due, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id, span_id,
            partition, trace_flags, type_name, content_type, metadata, payload, destination, turn)
        where m.due is not null;
    end if;

    if v_numbered > 0 then
        -- One draw for each 4,096 messages: the sequence steps by so many. After the locks, so that positions grow
        -- along a stream; and after the transaction's id (see wh_draw_position).
        select d.floor, d.xid, array[d.position] into v_floor, v_xid, v_draw from wh_draw_position() d;
        if v_count > 4096 then
            v_draw := v_draw || array(select nextval('wh_position') from generate_series(1, (v_count - 1) / 4096));
        end if;
        select s.current into strict v_segment from wh_segment s;

        if v_events > 0 then
            insert into wh_event_store (position, stream_seq, version, xid, span_id, stored_at, stream_id, message_id,
                correlation_id, causation_id, trace_id, partition, trace_flags, type_name, content_type, metadata,
                payload)
            select v_draw[(m.turn - 1) / 4096 + 1] + (m.turn - 1) % 4096, m.seq, m.version, v_xid, m.span_id,
                statement_timestamp(), m.stream_id, m.message_id, m.correlation_id, m.causation_id, m.trace_id,
                m.partition, m.trace_flags, m.type_name, m.content_type, m.metadata, m.payload
            from unnest(v_seq, v_version, span_ids, stream_ids, message_ids, correlation_ids, causation_ids, trace_ids,
                v_partition, trace_flags, type_names, content_types, metadata, payloads)
                with ordinality m(seq, version, span_id, stream_id, message_id, correlation_id, causation_id, trace_id,
                partition, trace_flags, type_name, content_type, metadata, payload, turn)
            where m.version > 0;
        end if;
        if v_events < v_numbered then
            insert into wh_outbox (position, stream_seq, xid, span_id, stored_at, lane_id, stream_id, message_id,
                correlation_id, causation_id, trace_id, partition, trace_flags, segment, type_name, content_type,
                metadata, payload)
            select v_draw[(m.turn - 1) / 4096 + 1] + (m.turn - 1) % 4096, m.seq, v_xid, m.span_id,
                statement_timestamp(), m.lane_id, m.stream_id, m.message_id, m.correlation_id, m.causation_id,
                m.trace_id, m.partition, m.trace_flags, v_segment, m.type_name, m.content_type, m.metadata, m.payload
            from unnest(v_seq, v_version, span_ids, v_lane, stream_ids, message_ids, correlation_ids, causation_ids,
                trace_ids, v_partition, trace_flags, type_names, content_types, metadata, payloads)
                with ordinality m(seq, version, span_id, lane_id, stream_id, message_id, correlation_id, causation_id,
                trace_id, partition, trace_flags, type_name, content_type, metadata, payload, turn)
            where m.version = 0 and m.seq > 0;
        end if;

        if v_has_references then
            select 180 / (max(r.size) + 1) into v_log_messages
            from (select count(*) as size from unnest(reference_messages) m group by m) r;
        end if;
        with reference as (
            select m.turn, m.destination
            from unnest(destinations, v_seq) with ordinality m(destination, seq, turn)
            where m.destination is not null and m.seq > 0
            union
            select r.message, r.destination
            from unnest(reference_messages, reference_destinations) r(message, destination)
            where v_has_references and v_seq[r.message] > 0
        ), placed as (
            select r.*, (dense_rank() over (order by r.turn) - 1) / v_log_messages as log_row
            from reference r
        ), named as (
            select p.*, dense_rank() over (partition by p.log_row order by p.destination) as name from placed p
        )
        insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version,
            lane_id, destination)
        select v_draw[(min(n.turn) - 1) / 4096 + 1] + (min(n.turn) - 1) % 4096, v_xid, v_floor, v_segment, false,
            array_agg(v_partition[n.turn] order by n.turn, n.name), array_agg(n.name::int2 order by n.turn, n.name),
            array_agg(v_seq[n.turn] order by n.turn, n.name), array_agg(v_version[n.turn] order by n.turn, n.name),
            array_agg(v_lane[n.turn] order by n.turn, n.name), array_agg(distinct n.destination order by n.destination)
        from named n
        group by n.log_row;
        if not found then
            insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version,
                lane_id, destination)
            values (v_draw[1], v_xid, v_floor, v_segment, false, '{}', '{}', '{}', '{}', '{}', '{}');
        end if;
    end if;

    return query
    select m.message_id, m.partition, case when m.seq > 0 then m.seq end, case when m.seq > 0 then m.version end,
        case when m.seq > 0 then v_draw[(m.turn - 1) / 4096 + 1] + (m.turn - 1) % 4096 end
    from unnest(message_ids, v_partition, v_seq, v_version) with ordinality m(message_id, partition, seq, version, turn)
    order by m.turn;
end
$$;

CREATE FUNCTION corelane.wh_stream_key(stream_id uuid) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select pg_catalog.uuid_hash(stream_id)
$$;

CREATE FUNCTION corelane.wh_truncate_segment(p_segment smallint, OUT truncated boolean, OUT blocked_by integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $_$
declare
    v_seen pg_snapshot;
    v_late bool;
begin
    truncated := false;
    begin
        execute format('lock table wh_log_%1$s, wh_outbox_%1$s in access exclusive mode nowait', p_segment);
    exception when lock_not_available then
        select l.pid into blocked_by
        from pg_locks l
        where l.locktype = 'relation' and l.granted and l.pid <> pg_backend_pid()
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.relation in (format('wh_log_%s', p_segment)::regclass, format('wh_outbox_%s', p_segment)::regclass)
        limit 1;
        return;
    end;

    -- A later statement than the lock.
    select r.seen into strict v_seen from wh_rotation r where r.segment = p_segment;
    execute format('select exists (select from wh_log_%s l where l.xid >= $1 or l.xid = any ($2))', p_segment)
    into v_late
    using pg_snapshot_xmax(v_seen)::text::int8, array(select x::text::int8 from pg_snapshot_xip(v_seen) x);
    delete from wh_rotation r where r.segment = p_segment;
    if v_late then
        return;
    end if;
    execute format('truncate wh_log_%1$s, wh_outbox_%1$s', p_segment);
    truncated := true;
end
$_$;

CREATE TABLE corelane.wh_cursor (
    number bigint NOT NULL,
    ownership bigint NOT NULL,
    written_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    incarnation integer NOT NULL,
    shard smallint NOT NULL,
    resolved pg_snapshot NOT NULL
);

ALTER TABLE corelane.wh_cursor ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_cursor_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE corelane.wh_dead_letter (
    dead_letter_id bigint NOT NULL,
    stream_seq bigint NOT NULL,
    version bigint NOT NULL,
    "position" bigint,
    span_id bigint,
    stored_at timestamp with time zone,
    dead_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    attempts integer NOT NULL,
    trace_flags smallint,
    reason smallint NOT NULL,
    error_cut boolean DEFAULT false NOT NULL,
    destination text NOT NULL,
    error text DEFAULT ''::text NOT NULL,
    error_fingerprint text NOT NULL,
    type_name text,
    content_type text,
    metadata bytea,
    payload bytea
);

ALTER TABLE corelane.wh_dead_letter ALTER COLUMN dead_letter_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_dead_letter_dead_letter_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE UNLOGGED TABLE corelane.wh_epoch (
    only_row boolean DEFAULT true NOT NULL,
    token uuid DEFAULT gen_random_uuid() NOT NULL,
    CONSTRAINT wh_epoch_only_row_check CHECK (only_row)
);

CREATE TABLE corelane.wh_event_store (
    "position" bigint NOT NULL,
    stream_seq bigint NOT NULL,
    version bigint NOT NULL,
    xid bigint NOT NULL,
    span_id bigint,
    stored_at timestamp with time zone NOT NULL,
    stream_id uuid NOT NULL,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
);

CREATE TABLE corelane.wh_flush_given_up (
    flush_number bigint NOT NULL,
    given_up_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    incarnation integer NOT NULL,
    shard smallint NOT NULL
);

CREATE TABLE corelane.wh_flush_truncated (
    flush_number bigint NOT NULL,
    xid bigint NOT NULL,
    "position" bigint NOT NULL,
    incarnation integer NOT NULL,
    shard smallint NOT NULL,
    owned boolean NOT NULL
);

CREATE TABLE corelane.wh_installation (
    only_row boolean DEFAULT true NOT NULL,
    system_identifier bigint NOT NULL,
    rebased_position bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    database_oid oid NOT NULL,
    partition_count integer NOT NULL,
    generation integer DEFAULT 1 NOT NULL,
    CONSTRAINT wh_installation_only_row_check CHECK (only_row),
    CONSTRAINT wh_installation_partition_count_check CHECK (((partition_count >= 1) AND (partition_count <= 65536)))
);

CREATE TABLE corelane.wh_instance (
    counter bigint DEFAULT 0 NOT NULL,
    ownership bigint DEFAULT 0 NOT NULL,
    lease_until timestamp with time zone NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    id uuid NOT NULL,
    number integer NOT NULL,
    shards integer DEFAULT 1 NOT NULL,
    state smallint DEFAULT 0 NOT NULL,
    service_name text NOT NULL,
    instance_name text NOT NULL,
    owns boolean,
    direct boolean DEFAULT true NOT NULL,
    CONSTRAINT wh_instance_instance_name_check CHECK (((octet_length(instance_name) >= 1) AND (octet_length(instance_name) <= 255))),
    CONSTRAINT wh_instance_service_name_check CHECK (((octet_length(service_name) >= 1) AND (octet_length(service_name) <= 255))),
    CONSTRAINT wh_instance_shards_check CHECK (((shards >= 1) AND (shards <= 1024))),
    CONSTRAINT wh_instance_state_check CHECK ((state = ANY (ARRAY[0, 1, 2])))
);

ALTER TABLE corelane.wh_instance ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_instance_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE corelane.wh_log (
    "position" bigint NOT NULL,
    xid bigint NOT NULL,
    floor bigint NOT NULL,
    flush_number bigint,
    incarnation integer,
    shard smallint,
    segment smallint NOT NULL,
    owned boolean NOT NULL,
    partition integer[] NOT NULL,
    destination_index smallint[] NOT NULL,
    stream_seq bigint[] NOT NULL,
    version bigint[] NOT NULL,
    lane_id uuid[] NOT NULL,
    destination text[] NOT NULL
)
PARTITION BY LIST (segment);

CREATE TABLE corelane.wh_log_0 (
    "position" bigint NOT NULL,
    xid bigint NOT NULL,
    floor bigint NOT NULL,
    flush_number bigint,
    incarnation integer,
    shard smallint,
    segment smallint NOT NULL,
    owned boolean NOT NULL,
    partition integer[] NOT NULL,
    destination_index smallint[] NOT NULL,
    stream_seq bigint[] NOT NULL,
    version bigint[] NOT NULL,
    lane_id uuid[] NOT NULL,
    destination text[] NOT NULL
)
WITH (toast_tuple_target='8160');
ALTER TABLE ONLY corelane.wh_log_0 ALTER COLUMN partition SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_0 ALTER COLUMN destination_index SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_0 ALTER COLUMN stream_seq SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_0 ALTER COLUMN version SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_0 ALTER COLUMN lane_id SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_0 ALTER COLUMN destination SET STORAGE MAIN;

CREATE TABLE corelane.wh_log_1 (
    "position" bigint NOT NULL,
    xid bigint NOT NULL,
    floor bigint NOT NULL,
    flush_number bigint,
    incarnation integer,
    shard smallint,
    segment smallint NOT NULL,
    owned boolean NOT NULL,
    partition integer[] NOT NULL,
    destination_index smallint[] NOT NULL,
    stream_seq bigint[] NOT NULL,
    version bigint[] NOT NULL,
    lane_id uuid[] NOT NULL,
    destination text[] NOT NULL
)
WITH (toast_tuple_target='8160');
ALTER TABLE ONLY corelane.wh_log_1 ALTER COLUMN partition SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_1 ALTER COLUMN destination_index SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_1 ALTER COLUMN stream_seq SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_1 ALTER COLUMN version SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_1 ALTER COLUMN lane_id SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_1 ALTER COLUMN destination SET STORAGE MAIN;

CREATE TABLE corelane.wh_log_2 (
    "position" bigint NOT NULL,
    xid bigint NOT NULL,
    floor bigint NOT NULL,
    flush_number bigint,
    incarnation integer,
    shard smallint,
    segment smallint NOT NULL,
    owned boolean NOT NULL,
    partition integer[] NOT NULL,
    destination_index smallint[] NOT NULL,
    stream_seq bigint[] NOT NULL,
    version bigint[] NOT NULL,
    lane_id uuid[] NOT NULL,
    destination text[] NOT NULL
)
WITH (toast_tuple_target='8160');
ALTER TABLE ONLY corelane.wh_log_2 ALTER COLUMN partition SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_2 ALTER COLUMN destination_index SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_2 ALTER COLUMN stream_seq SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_2 ALTER COLUMN version SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_2 ALTER COLUMN lane_id SET STORAGE PLAIN;
ALTER TABLE ONLY corelane.wh_log_2 ALTER COLUMN destination SET STORAGE MAIN;

CREATE TABLE corelane.wh_outbox (
    "position" bigint NOT NULL,
    stream_seq bigint NOT NULL,
    xid bigint NOT NULL,
    span_id bigint,
    stored_at timestamp with time zone NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    segment smallint NOT NULL,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
)
PARTITION BY LIST (segment);

CREATE TABLE corelane.wh_outbox_0 (
    "position" bigint NOT NULL,
    stream_seq bigint NOT NULL,
    xid bigint NOT NULL,
    span_id bigint,
    stored_at timestamp with time zone NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    segment smallint NOT NULL,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
);

CREATE TABLE corelane.wh_outbox_1 (
    "position" bigint NOT NULL,
    stream_seq bigint NOT NULL,
    xid bigint NOT NULL,
    span_id bigint,
    stored_at timestamp with time zone NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    segment smallint NOT NULL,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
);

CREATE TABLE corelane.wh_outbox_2 (
    "position" bigint NOT NULL,
    stream_seq bigint NOT NULL,
    xid bigint NOT NULL,
    span_id bigint,
    stored_at timestamp with time zone NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    segment smallint NOT NULL,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
);

CREATE TABLE corelane.wh_parked (
    stream_seq bigint NOT NULL,
    due timestamp with time zone NOT NULL,
    parked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    lane_id uuid NOT NULL,
    partition integer NOT NULL,
    attempts integer NOT NULL,
    reason smallint NOT NULL,
    error_cut boolean DEFAULT false NOT NULL,
    destination text NOT NULL,
    error text DEFAULT ''::text NOT NULL
);

CREATE TABLE corelane.wh_parked_reference (
    stream_seq bigint NOT NULL,
    version bigint NOT NULL,
    "position" bigint,
    span_id bigint,
    stored_at timestamp with time zone,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    destination text NOT NULL,
    type_name text,
    content_type text,
    metadata bytea,
    payload bytea
);

CREATE TABLE corelane.wh_partition (
    fence bigint DEFAULT 0 NOT NULL,
    ownership bigint DEFAULT 0 NOT NULL,
    partition integer NOT NULL,
    owner integer,
    base pg_snapshot DEFAULT '1:1:'::pg_snapshot NOT NULL
);

CREATE SEQUENCE corelane.wh_position
    START WITH 1
    INCREMENT BY 4096
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE VIEW corelane.wh_resolved AS
 SELECT p.partition,
    p.owner,
    p.base,
    COALESCE(c.resolved, '1:1:'::pg_snapshot) AS cursor
   FROM ((corelane.wh_partition p
     LEFT JOIN corelane.wh_instance i ON ((i.number = p.owner)))
     LEFT JOIN LATERAL ( SELECT c_1.resolved
           FROM corelane.wh_cursor c_1
          WHERE ((c_1.incarnation = i.number) AND (c_1.shard = ((p.partition % i.shards))::smallint) AND (c_1.ownership >= p.ownership))
          ORDER BY c_1.number DESC
         LIMIT 1) c ON (true));

CREATE TABLE corelane.wh_rotation (
    resolved_to bigint DEFAULT 0 NOT NULL,
    carried_to uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    segment smallint NOT NULL,
    is_resolved boolean DEFAULT false NOT NULL,
    is_carried boolean DEFAULT false NOT NULL,
    seen pg_snapshot NOT NULL,
    noted_to bigint DEFAULT 0 NOT NULL,
    is_noted boolean DEFAULT false NOT NULL
);

CREATE TABLE corelane.wh_scheduled (
    scheduled_id bigint NOT NULL,
    span_id bigint,
    due timestamp with time zone NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition integer NOT NULL,
    trace_flags smallint,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL,
    destination text[] NOT NULL
);

ALTER TABLE corelane.wh_scheduled ALTER COLUMN scheduled_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_scheduled_scheduled_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE corelane.wh_schema_migration (
    kind text NOT NULL,
    name text NOT NULL,
    hash text NOT NULL,
    schema_version integer NOT NULL,
    library_version text NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT wh_schema_migration_kind_check CHECK ((kind = ANY (ARRAY['migration'::text, 'function'::text])))
);

CREATE TABLE corelane.wh_segment (
    only_row boolean DEFAULT true NOT NULL,
    switched_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    current smallint DEFAULT 0 NOT NULL,
    CONSTRAINT wh_segment_current_check CHECK (((current >= 0) AND (current <= 2))),
    CONSTRAINT wh_segment_only_row_check CHECK (only_row)
);

CREATE TABLE corelane.wh_stream (
    last_seq bigint NOT NULL,
    stream_id uuid NOT NULL
);

ALTER TABLE ONLY corelane.wh_log ATTACH PARTITION corelane.wh_log_0 FOR VALUES IN ('0');

ALTER TABLE ONLY corelane.wh_log ATTACH PARTITION corelane.wh_log_1 FOR VALUES IN ('1');

ALTER TABLE ONLY corelane.wh_log ATTACH PARTITION corelane.wh_log_2 FOR VALUES IN ('2');

ALTER TABLE ONLY corelane.wh_outbox ATTACH PARTITION corelane.wh_outbox_0 FOR VALUES IN ('0');

ALTER TABLE ONLY corelane.wh_outbox ATTACH PARTITION corelane.wh_outbox_1 FOR VALUES IN ('1');

ALTER TABLE ONLY corelane.wh_outbox ATTACH PARTITION corelane.wh_outbox_2 FOR VALUES IN ('2');

ALTER TABLE ONLY corelane.wh_cursor
    ADD CONSTRAINT wh_cursor_pkey PRIMARY KEY (incarnation, shard, number);

ALTER TABLE ONLY corelane.wh_dead_letter
    ADD CONSTRAINT wh_dead_letter_lane_id_destination_stream_seq_key UNIQUE (lane_id, destination, stream_seq);

ALTER TABLE ONLY corelane.wh_dead_letter
    ADD CONSTRAINT wh_dead_letter_pkey PRIMARY KEY (dead_letter_id);

ALTER TABLE ONLY corelane.wh_epoch
    ADD CONSTRAINT wh_epoch_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY corelane.wh_event_store
    ADD CONSTRAINT wh_event_store_pkey PRIMARY KEY (stream_id, version);

ALTER TABLE ONLY corelane.wh_flush_given_up
    ADD CONSTRAINT wh_flush_given_up_pkey PRIMARY KEY (incarnation, shard);

ALTER TABLE ONLY corelane.wh_flush_truncated
    ADD CONSTRAINT wh_flush_truncated_pkey PRIMARY KEY (incarnation, shard);

ALTER TABLE ONLY corelane.wh_installation
    ADD CONSTRAINT wh_installation_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY corelane.wh_instance
    ADD CONSTRAINT wh_instance_id_key UNIQUE (id);

ALTER TABLE ONLY corelane.wh_instance
    ADD CONSTRAINT wh_instance_pkey PRIMARY KEY (number);

ALTER TABLE ONLY corelane.wh_parked
    ADD CONSTRAINT wh_parked_pkey PRIMARY KEY (lane_id, destination);

ALTER TABLE ONLY corelane.wh_parked_reference
    ADD CONSTRAINT wh_parked_reference_pkey PRIMARY KEY (lane_id, destination, stream_seq);

ALTER TABLE ONLY corelane.wh_partition
    ADD CONSTRAINT wh_partition_pkey PRIMARY KEY (partition);

ALTER TABLE ONLY corelane.wh_rotation
    ADD CONSTRAINT wh_rotation_pkey PRIMARY KEY (segment);

ALTER TABLE ONLY corelane.wh_scheduled
    ADD CONSTRAINT wh_scheduled_pkey PRIMARY KEY (scheduled_id);

ALTER TABLE ONLY corelane.wh_schema_migration
    ADD CONSTRAINT wh_schema_migration_pkey PRIMARY KEY (kind, name);

ALTER TABLE ONLY corelane.wh_segment
    ADD CONSTRAINT wh_segment_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY corelane.wh_stream
    ADD CONSTRAINT wh_stream_pkey PRIMARY KEY (stream_id);

CREATE INDEX wh_event_store_position ON corelane.wh_event_store USING brin ("position") WITH (pages_per_range='32');

CREATE INDEX wh_event_store_xid ON corelane.wh_event_store USING brin (xid) WITH (pages_per_range='32');

CREATE INDEX wh_log_0_foreign ON corelane.wh_log_0 USING btree (xid) WHERE (NOT owned);

CREATE INDEX wh_log_0_position ON corelane.wh_log_0 USING btree ("position");

CREATE INDEX wh_log_0_xid ON corelane.wh_log_0 USING btree (xid, "position");

CREATE INDEX wh_log_1_foreign ON corelane.wh_log_1 USING btree (xid) WHERE (NOT owned);

CREATE INDEX wh_log_1_position ON corelane.wh_log_1 USING btree ("position");

CREATE INDEX wh_log_1_xid ON corelane.wh_log_1 USING btree (xid, "position");

CREATE INDEX wh_log_2_foreign ON corelane.wh_log_2 USING btree (xid) WHERE (NOT owned);

CREATE INDEX wh_log_2_position ON corelane.wh_log_2 USING btree ("position");

CREATE INDEX wh_log_2_xid ON corelane.wh_log_2 USING btree (xid, "position");

CREATE UNIQUE INDEX wh_outbox_0_lane ON corelane.wh_outbox_0 USING btree (lane_id, stream_seq);

CREATE UNIQUE INDEX wh_outbox_1_lane ON corelane.wh_outbox_1 USING btree (lane_id, stream_seq);

CREATE UNIQUE INDEX wh_outbox_2_lane ON corelane.wh_outbox_2 USING btree (lane_id, stream_seq);

CREATE INDEX wh_parked_partition ON corelane.wh_parked USING btree (partition);

CREATE INDEX wh_scheduled_due ON corelane.wh_scheduled USING btree (due);

ALTER TABLE ONLY corelane.wh_partition
    ADD CONSTRAINT wh_partition_owner_fkey FOREIGN KEY (owner) REFERENCES corelane.wh_instance(number);
