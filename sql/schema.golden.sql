-- What pg_dump shows of a fresh schema. Written by tests/it/schema.rs with CORELANE_UPDATE_GOLDEN=1, never by hand.
CREATE SCHEMA corelane;

CREATE TYPE corelane.wh_feed_place AS (
	started bigint,
	read pg_snapshot,
	floor bigint,
	target pg_snapshot,
	target_floor bigint,
	"position" bigint,
	ceiling bigint,
	"window" bigint,
	quiet boolean,
	before_from bigint,
	before_read pg_snapshot,
	before_target pg_snapshot,
	before_position bigint,
	before_is_foreign boolean
);

CREATE FUNCTION corelane.announce(p_incarnation integer DEFAULT NULL::integer) RETURNS void
    LANGUAGE sql
    AS $$
    select pg_notify("corelane".wh_channel(), 'work:' || coalesce(p_incarnation::text, ''))
$$;

CREATE FUNCTION corelane.append_events(message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], expected_versions bigint[] DEFAULT NULL::bigint[], destinations text[] DEFAULT NULL::text[], correlation_ids uuid[] DEFAULT NULL::uuid[], causation_ids uuid[] DEFAULT NULL::uuid[], content_types text[] DEFAULT NULL::text[], metadata bytea[] DEFAULT NULL::bytea[]) RETURNS TABLE(message_id uuid, partition integer, stream_seq bigint, version bigint, "position" bigint)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_count constant int4 := coalesce(cardinality(message_ids), 0);
    v_turn int8;
    v_stream uuid[];
    v_expected int8[];
begin
    if cardinality(stream_ids) is distinct from cardinality(message_ids)
        or cardinality(coalesce(expected_versions, array_fill(null::int8, array[v_count]))) is distinct from v_count then
        raise exception 'message_ids has % elements, stream_ids %, expected_versions %: give each event one', v_count,
            coalesce(cardinality(stream_ids), 0), coalesce(cardinality(expected_versions), 0) using errcode = '22023';
    end if;
    select s.turn into v_turn from unnest(stream_ids) with ordinality s(id, turn) where s.id is null order by 1 limit 1;
    if found then
        raise exception 'element %: an event stands in a stream', v_turn using errcode = '22023';
    end if;
    with e as (
        select e.id, e.turn, e.expected,
            e.expected - row_number() over (partition by e.id order by e.turn) + 1 as expected_first
        from unnest(stream_ids, expected_versions) with ordinality e(id, expected, turn)
    ), s as (
        select e.id, min(e.turn) as turn, min(e.expected_first) as expected, max(e.expected_first) as highest
        from e group by e.id
    )
    select array_agg(s.id order by s.turn), array_agg(s.expected order by s.turn),
        min(s.turn) filter (where s.expected <> s.highest or s.expected < 0)
    into v_stream, v_expected, v_turn
    from s;
    if v_turn is not null then
        raise exception 'element %: events of stream % expect what cannot all be true: each event raises the version by one',
            v_turn, stream_ids[v_turn] using errcode = '22023';
    end if;
    if v_count > 0 then
        perform expect_versions(v_stream, v_expected);
    end if;
    return query select * from store_outbox_messages(message_ids, stream_ids, type_names, payloads,
        array_fill(true, array[v_count]), coalesce(destinations, array_fill(null::text, array[v_count])),
        correlation_ids => append_events.correlation_ids, causation_ids => append_events.causation_ids,
        content_types => append_events.content_types, metadata => append_events.metadata);
end
$$;

CREATE FUNCTION corelane.begin_feed(p_from bigint DEFAULT 0) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_edge pg_snapshot := '1:1:';
    v_floor int8;
    v_epoch uuid;
    v_installation wh_installation;
    v_at jsonb;
begin
    if p_from < 0 then
        raise exception 'a position is 0 (the beginning) or more, not %', p_from using errcode = '22023';
    end if;
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: the feed needs the primary' using errcode = '25006';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'the feed is read at READ COMMITTED' using errcode = '25001';
    end if;
    select i.* into strict v_installation from wh_installation i;
    if p_from is null then
        -- Before this transaction has an id.
        select e.edge, greatest(e.floor, 0) into v_edge, v_floor from wh_read_edge() e;
    end if;
    v_epoch := wh_epoch_token();
    v_at := jsonb_build_object(
        'started', coalesce(p_from, 0), 'read', v_edge,
        'floor', coalesce(v_floor, greatest(p_from, v_installation.rebased_position)), 'target', null,
        'target_floor', 0, 'position', 0, 'ceiling', null, 'window', null, 'quiet', false,
        'before_from', coalesce(p_from, v_installation.rebased_position), 'before_read', '1:1:', 'before_target', null,
        'before_position', 0, 'before_is_foreign', false);
    if p_from is null and not wh_prove_place(pg_snapshot_xmax(v_edge)) then
        raise exception 'the transaction has written before: begin a feed in one of its own' using errcode = 'CL021';
    end if;
    return jsonb_build_object(
        'feed', 1, 'server', v_installation.system_identifier, 'generation', v_installation.generation,
        'rebased', v_installation.rebased_position, 'epoch', v_epoch, 'proved_at', extract(epoch from clock_timestamp()),
        'at', v_at, 'proved', v_at);
end
$$;

CREATE FUNCTION corelane.begin_inbox(p_consumer smallint, p_message_ids uuid[], p_lane_ids uuid[], p_held_lanes uuid[] DEFAULT '{}'::uuid[], p_unlock_lanes uuid[] DEFAULT '{}'::uuid[], p_days integer[] DEFAULT NULL::integer[]) RETURNS smallint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
declare
    v_count constant int4 := cardinality(p_message_ids);
    v_class constant int4 := "corelane".wh_lock_class(0);
    v_wanted uuid[];
    v_locked uuid[];
    v_states int2[];
    v_days int4[] := p_days;
    v_day int4;
    v_ids uuid[];
    v_seen uuid[];
    v_parked uuid[] := '{}';
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception 'begin_inbox needs READ COMMITTED: what was decided before the lock must be seen'
            using errcode = '22023';
    end if;
    if v_count is distinct from cardinality(p_lane_ids) or p_message_ids is null
        or array_position(p_message_ids, null) is not null or array_position(p_lane_ids, null) is not null
        or coalesce(cardinality(p_days), v_count) is distinct from v_count
        or array_position(p_days, null) is not null or p_consumer is null
    then
        raise exception 'begin_inbox: % message ids, % lanes, % days, and no null among them',
            coalesce(v_count::text, 'no'), coalesce(cardinality(p_lane_ids)::text, 'no'),
            coalesce(cardinality(p_days)::text, 'no')
            using errcode = '22023';
    end if;
    if cardinality(p_unlock_lanes) > 0 then
        perform pg_advisory_unlock(v_class, "corelane".wh_inbox_key(p_consumer, l)) from unnest(p_unlock_lanes) l;
    end if;
    if v_count = 0 then
        return '{}';
    end if;
    v_wanted := array(select distinct l from unnest(p_lane_ids) l);
    if cardinality(p_held_lanes) > 0 then
        v_wanted := array(select l from unnest(v_wanted) l except select h from unnest(p_held_lanes) h);
    end if;
    v_locked := array(
        select l from unnest(v_wanted) l where pg_try_advisory_lock(v_class, "corelane".wh_inbox_key(p_consumer, l)));

    -- Later statements than the locks: who had them before has committed. A day a statement: so each reads one part
    -- alone, which for an id by itself costs three times as much.
    if v_days is null then
        v_days := array(
            select "corelane".wh_inbox_day(g.id) from unnest(p_message_ids) with ordinality g(id, turn) order by g.turn);
    end if;
    v_day := v_days[1];
    if v_day = all (v_days) then
        v_seen := array(
            select s.message_id from "corelane".wh_inbox_seen s
            where s.day = v_day and s.consumer = p_consumer and s.message_id = any (p_message_ids));
    else
        v_seen := '{}';
        for v_day, v_ids in
            select g.day, array_agg(g.id) from unnest(p_message_ids, v_days) g(id, day) group by 1
        loop
            v_seen := v_seen || array(
                select s.message_id from "corelane".wh_inbox_seen s
                where s.day = v_day and s.consumer = p_consumer and s.message_id = any (v_ids));
        end loop;
    end if;
    -- One that came before its time, or long after it, stands apart from its day.
    if exists (select from "corelane".wh_inbox_seen s where s.day = -2) then
        v_seen := v_seen || array(
            select s.message_id from "corelane".wh_inbox_seen s
            where s.day = -2 and s.consumer = p_consumer and s.message_id = any (p_message_ids));
    end if;
    if exists (select from "corelane".wh_inbox_parked k where k.consumer = p_consumer) then
        v_parked := array(
            select k.lane_id from "corelane".wh_inbox_parked k
            where k.consumer = p_consumer and k.lane_id = any (v_locked || p_held_lanes));
    end if;
    -- As a rule all are new, and one look at each kind of exception is all there is to do.
    if v_seen = '{}' and v_parked = '{}' and cardinality(v_locked) = cardinality(v_wanted)
        and (select count(distinct g) from unnest(p_message_ids) g) = v_count
    then
        return array_fill(0::int2, array[v_count]);
    end if;

    with given as (
        select g.message_id, g.lane_id, g.turn, row_number() over (partition by g.message_id order by g.turn) as nth
        from unnest(p_message_ids, p_lane_ids) with ordinality g(message_id, lane_id, turn)
    )
    select array_agg((case
            when g.nth > 1 or s.message_id is not null then 1
            when l.lane_id is null then 2
            when k.lane_id is not null then 3
            else 0
        end)::int2 order by g.turn)
    into v_states
    from given g
    left join (select distinct m from unnest(v_locked || p_held_lanes) m) l(lane_id) on l.lane_id = g.lane_id
    left join unnest(v_parked) k(lane_id) on k.lane_id = g.lane_id
    left join (select distinct u from unnest(v_seen) u) s(message_id) on s.message_id = g.message_id;

    if array_position(v_states, 1::int2) is not null and cardinality(v_locked) > 0 then
        -- Lanes of nothing but duplicates.
        perform pg_advisory_unlock(v_class, "corelane".wh_inbox_key(p_consumer, l.lane_id))
        from (
            select l from unnest(v_locked) l
            except
            select s.lane_id from unnest(p_lane_ids, v_states) s(lane_id, state) where s.state in (0, 3)
        ) l(lane_id);
    end if;
    return v_states;
end
$$;

CREATE FUNCTION corelane.bury_inbox(p_consumer smallint, p_message_ids uuid[], p_attempts integer[], p_reasons smallint[], p_errors text[], p_hold boolean DEFAULT false) RETURNS boolean[]
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_buried uuid[];
begin
    perform from wh_inbox i
    where i.consumer = p_consumer and i.message_id = any (p_message_ids)
    order by i.message_id
    for update;
    with given as (
        select distinct on (g.message_id) g.message_id, g.attempts, g.reason, wh_cut_error(g.error) as error,
            coalesce(octet_length(g.error) > 8192, false) as error_cut
        from unnest(p_message_ids, p_attempts, p_reasons, p_errors) with ordinality
            g(message_id, attempts, reason, error, turn)
        order by g.message_id, g.turn
    ), gone as (
        delete from wh_inbox i using given g
        where i.consumer = p_consumer and i.message_id = g.message_id
        returning i.*, g.attempts, g.reason, g.error, g.error_cut
    ), buried as (
        insert into wh_inbox_dead_letter as d (arrival, span_id, received_at, lane_id, stream_id, message_id,
            correlation_id, causation_id, trace_id, attempts, retried, consumer, trace_flags, reason, error_cut, source,
            error, error_fingerprint, type_name, content_type, metadata, payload)
        select g.arrival, g.span_id, g.received_at, g.lane_id, g.stream_id, g.message_id, g.correlation_id,
            g.causation_id, g.trace_id, g.attempts, g.retried, g.consumer, g.trace_flags, g.reason, g.error_cut, g.source,
            g.error, md5(regexp_replace(left(g.error, 512), '[0-9a-fA-F]{8,}|[0-9]+', '#', 'g')),
            g.type_name, g.content_type, g.metadata, g.payload
        from gone g
        order by g.arrival
        returning d.message_id
    )
    select coalesce(array_agg(b.message_id), '{}') into v_buried from buried b;
    if p_hold then
        insert into wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason, held, error_cut,
            error)
        select distinct on (d.lane_id) 'infinity', d.lane_id, d.message_id,
            compute_partition(d.lane_id, (select i.partition_count from wh_installation i)), d.attempts, p_consumer,
            d.reason, true, d.error_cut, d.error
        from wh_inbox_dead_letter d
        where d.consumer = p_consumer and d.message_id = any (v_buried)
        order by d.lane_id, d.arrival
        on conflict (consumer, lane_id) do update
        set due = 'infinity', held = true, message_id = excluded.message_id, attempts = excluded.attempts,
            reason = excluded.reason, error_cut = excluded.error_cut, error = excluded.error,
            leased_to = null, leased_through = null, leased_rows = null;
    end if;
    return coalesce((
        select array_agg(g.message_id = any (v_buried) and g.nth = 1 order by g.turn)
        from (
            select u.message_id, u.turn, row_number() over (partition by u.message_id order by u.turn) as nth
            from unnest(p_message_ids) with ordinality u(message_id, turn)
        ) g), '{}');
end
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

CREATE FUNCTION corelane.checkpoint_subscription(p_subscription integer, p_incarnation integer, p_partitions integer[], p_fences bigint[], p_resolved pg_snapshot[], p_floor bigint, p_target pg_snapshot, p_target_floor bigint, p_position bigint, p_before boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_count int4;
    v_xmax xid8;
begin
    -- After a crash ids are given again from the last one that is written down on. What is named as read must lie below
    -- this transaction's own, which is written down with it.
    select max(x.xmax) into v_xmax
    from (
        select pg_snapshot_xmax(p_target) as xmax
        union all
        select pg_snapshot_xmax(r) from unnest(p_resolved) r
    ) x;
    if pg_current_xact_id() < v_xmax then
        raise exception 'the transaction has written before the events were read: begin it after them'
            using errcode = 'CL021';
    end if;
    update wh_subscription_partition p
    set fence = p.fence + 1, resolved = u.resolved, floor = p_floor, target = p_target, target_floor = p_target_floor,
        position = p_position,
        before_from = case when p_before then p.before_from else
            greatest(p.before_from, (select i.rebased_position from wh_installation i)) end,
        updated_at = clock_timestamp()
    from unnest(p_partitions, p_fences, p_resolved) u("partition", fence, resolved)
    where p.subscription = p_subscription and p.partition = u.partition and p.owner = p_incarnation
        and p.fence = u.fence;
    get diagnostics v_count = row_count;
    if v_count <> cardinality(p_partitions) then
        raise exception '% of % partitions are not at this member and place any more: roll back',
            cardinality(p_partitions) - v_count, cardinality(p_partitions) using errcode = 'CL020';
    end if;
end
$$;

CREATE FUNCTION corelane.claim_inbox(p_consumer smallint, p_partitions integer[] DEFAULT NULL::integer[], p_held_lanes uuid[] DEFAULT '{}'::uuid[], p_lanes_max integer DEFAULT 100, p_rows_max integer DEFAULT 200, p_bytes_max bigint DEFAULT 8388608) RETURNS TABLE(lane_id uuid, message_id uuid, stream_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, received_at timestamp with time zone, attempts integer, source text, type_name text, content_type text, metadata bytea, payload bytea, more boolean)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
declare
    v_after constant text[] := string_to_array(nullif(current_setting('corelane.claimed_to', true), ''), ' ');
    v_is_ours constant bool := coalesce(v_after[1] = wh_lock_class(0)::text and v_after[2] = p_consumer::text, false);
    v_now constant timestamptz := clock_timestamp(); -- A bound of the index: lanes that are not due are not looked at.
    v_seen int4 := 0;
    v_due timestamptz;
    v_lane uuid;
    v_is_wanted bool;
    v_is_cut bool;
    v_locked uuid[] := '{}';
    v_taken uuid[];
    v_messages uuid[];
    v_more bool;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception 'claim_inbox needs READ COMMITTED: what was decided before the lock must be seen'
            using errcode = '22023';
    end if;
    if coalesce(p_lanes_max, 0) not between 1 and 10000 or coalesce(p_rows_max, 0) not between 1 and 10000
        or coalesce(p_bytes_max, 0) < 1 then
        raise exception 'bounds: 1 to 10000 lanes, 1 to 10000 rows, at least 1 byte' using errcode = '22023';
    end if;
    for v_due, v_lane, v_is_wanted in
        select k.due, k.lane_id,
            (p_partitions is null or k.partition = any (p_partitions)) and k.lane_id <> all (coalesce(p_held_lanes, '{}'))
        from wh_inbox_parked k
        where k.consumer = p_consumer and k.due < 'infinity' and k.due <= v_now
            and (not v_is_ours
                or (k.due, k.lane_id) > ('epoch'::timestamptz + v_after[3]::int8 * interval '1 us', v_after[4]::uuid))
        order by k.due, k.lane_id
    loop
        v_seen := v_seen + 1;
        if v_is_wanted and pg_try_advisory_lock(wh_lock_class(0), wh_inbox_key(p_consumer, v_lane)) then
            v_locked := v_locked || v_lane;
        end if;
        exit when cardinality(v_locked) = p_lanes_max or v_seen = p_lanes_max * 100;
    end loop;
    v_is_cut := v_seen = p_lanes_max * 100;
    if v_is_cut then
        perform set_config('corelane.claimed_to', concat_ws(' ', wh_lock_class(0), p_consumer,
            (extract(epoch from v_due) * 1000000)::int8, v_lane), false);
    elsif v_is_ours then
        perform set_config('corelane.claimed_to', '', false);
    end if;
    if cardinality(v_locked) = 0 then
        return;
    end if;

    -- Later statements than the locks: another session may have handled a lane meanwhile.
    with lane as (
        select k.lane_id, k.due from wh_inbox_parked k
        where k.consumer = p_consumer and k.lane_id = any (v_locked) and k.due <= v_now
        order by k.due, k.lane_id
    ), read as (
        -- Lane after lane, until there are enough: each may have many times p_rows_max.
        select l.due, i.*
        from lane l
        cross join lateral (
            select i.lane_id, i.message_id, i.arrival, octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) as bytes
            from wh_inbox i
            where i.consumer = p_consumer and i.lane_id = l.lane_id
            order by i.arrival
            limit p_rows_max + 1
        ) i
        limit p_rows_max + 1
    ), kept as (
        select r.lane_id, r.message_id, row_number() over w as nth, sum(r.bytes) over w as bytes
        from read r
        window w as (order by r.due, r.lane_id, r.arrival)
    )
    select coalesce(array_agg(k.message_id order by k.nth) filter (where k.fits), '{}'),
        coalesce(array_agg(distinct k.lane_id) filter (where k.fits), '{}'),
        coalesce(bool_or(not k.fits), false) or v_is_cut or cardinality(v_locked) = p_lanes_max
    into v_messages, v_taken, v_more
    from (select k.*, k.nth = 1 or k.nth <= p_rows_max and k.bytes <= p_bytes_max as fits from kept k) k;
    -- Somebody has deleted what was kept.
    perform unpark_inbox(p_consumer, array(
        select u.lane_id from unnest(v_locked) u(lane_id)
        where not exists (select from wh_inbox i where i.consumer = p_consumer and i.lane_id = u.lane_id)));
    perform pg_advisory_unlock(wh_lock_class(0), wh_inbox_key(p_consumer, u.lane_id))
    from unnest(v_locked) u(lane_id)
    where u.lane_id <> all (v_taken);

    return query
    select i.lane_id, i.message_id, i.stream_id, i.correlation_id, i.causation_id, i.trace_id, i.span_id, i.trace_flags,
        i.received_at, case when k.message_id = i.message_id then k.attempts else 0 end, i.source, i.type_name,
        i.content_type, i.metadata, i.payload, v_more
    from unnest(v_messages) with ordinality m(message_id, turn)
    join wh_inbox i on i.consumer = p_consumer and i.message_id = m.message_id
    left join wh_inbox_parked k on k.consumer = p_consumer and k.lane_id = i.lane_id
    order by m.turn;
end
$$;

CREATE FUNCTION corelane.claim_outbox_messages(p_instance_id uuid, p_lease_seconds integer DEFAULT 30, p_max_streams integer DEFAULT 1000, p_max_rows integer DEFAULT 1000, p_max_rows_per_stream integer DEFAULT 100, p_again boolean DEFAULT false) RETURNS TABLE(message_id uuid, destination text, stream_id uuid, stream_seq bigint, version bigint, "position" bigint, partition integer, fence bigint, attempts integer, status integer, flags integer, type_name text, content_type text, payload bytea, metadata bytea, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, stored_at timestamp with time zone)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_incarnation int4;
    v_handed_at timestamptz;
begin
    perform wh_require('p_max_streams', p_max_streams, 1, 1000000);
    perform wh_require('p_max_rows', p_max_rows, 1, 10000);
    perform wh_require('p_max_rows_per_stream', p_max_rows_per_stream, 1, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, true);
    if v_incarnation is null then
        -- Not an exception: it would take back that the partitions are free.
        return;
    end if;
    select h.handed_at into v_handed_at
    from wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, p_max_streams, p_max_rows, p_max_rows_per_stream) h;
    return query select w.* from wh_work_in_hand(v_incarnation, v_handed_at, p_again) w;
end
$$;

CREATE FUNCTION corelane.claim_parked(p_lane_id uuid, p_destination text, p_rows_max integer) RETURNS TABLE(stream_seq bigint, version bigint, span_id bigint, stream_id uuid, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, partition integer, trace_flags smallint, type_name text, content_type text, metadata bytea, payload bytea, replayed boolean)
    LANGUAGE sql STABLE
    AS $$
    select k.stream_seq, k.version, coalesce(e.span_id, k.span_id), coalesce(e.stream_id, k.stream_id),
        coalesce(e.message_id, k.message_id), coalesce(e.correlation_id, k.correlation_id),
        coalesce(e.causation_id, k.causation_id), coalesce(e.trace_id, k.trace_id), k.partition,
        coalesce(e.trace_flags, k.trace_flags), coalesce(e.type_name, k.type_name),
        coalesce(e.content_type, k.content_type), coalesce(e.metadata, k.metadata), coalesce(e.payload, k.payload),
        k.retried > 0
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

CREATE FUNCTION corelane.complete_outbox_messages(p_instance_id uuid, p_message_ids uuid[], p_destinations text[] DEFAULT NULL::text[], p_statuses integer[] DEFAULT NULL::integer[], p_lease_seconds integer DEFAULT 30, OUT lease_lost boolean, OUT completed integer, OUT returned integer, OUT unknown integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    perform wh_require('length of p_message_ids', coalesce(cardinality(p_message_ids), 0), 0, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select c.* into completed, returned, unknown
        from wh_complete_work(v_incarnation, p_message_ids, p_destinations, p_statuses) c;
        perform wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, 0, 1, 1);
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

CREATE FUNCTION corelane.consumer_number(p_name text) RETURNS smallint
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_consumer int2;
begin
    if coalesce(octet_length(p_name), 0) not between 1 and 255 then
        raise exception 'a consumer''s name has 1 to 255 bytes, this one has %', coalesce(octet_length(p_name), 0)
            using errcode = '22023';
    end if;
    perform wh_make_inbox_days(3);
    select c.consumer into v_consumer from wh_consumer c where c.name = p_name;
    if v_consumer is null then
        if (select count(*) from wh_consumer) >= 1000 then
            raise exception 'there are 1000 consumers already' using errcode = '22023',
                hint = 'A consumer is a part of a service, not one of its instances.';
        end if;
        insert into wh_consumer (name) values (p_name) on conflict (name) do nothing;
        -- A later statement: of another transaction that was first.
        select c.consumer into strict v_consumer from wh_consumer c where c.name = p_name;
    end if;
    return v_consumer;
end
$$;

CREATE FUNCTION corelane.count_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_destination text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 100) RETURNS TABLE(destination text, type_name text, reason smallint, error_fingerprint text, dead_letters bigint, holding bigint, first_at timestamp with time zone, last_at timestamp with time zone, last_id bigint, error text)
    LANGUAGE sql STABLE
    AS $$
    select d.destination, d.type_name, d.reason, d.error_fingerprint, count(*), count(k.lane_id), min(d.dead_at),
        max(d.dead_at), max(d.dead_letter_id), min(d.error)
    from "corelane".wh_match_dead_letters(p_all, p_ids, p_destination, p_type, p_reason, p_fingerprint, p_stream,
        p_dead_from, p_dead_before, p_after, 10000) m
    join "corelane".wh_dead_letter d on d.dead_letter_id = m.dead_letter_id
    left join "corelane".wh_parked k
        on k.lane_id = d.lane_id and k.destination = d.destination and k.held and k.stream_seq = d.stream_seq
    group by d.destination, d.type_name, d.reason, d.error_fingerprint
    order by count(*) desc, max(d.dead_letter_id)
    limit p_rows_max
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

CREATE FUNCTION corelane.discard_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_destination text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT matched integer, OUT discarded integer, OUT released integer, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_ids int8[];
    v_lanes uuid[];
    v_destinations text[];
begin
    discarded := 0;
    select t.ids, t.more into v_ids, more from wh_take_dead_letters(p_all, p_ids, p_destination, p_type, p_reason,
        p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;

    -- A later statement than the locks: an owner may have begun to hold a lane, another operator may have been here.
    select count(*), coalesce(array_agg(d.lane_id) filter (where k.held), '{}'),
        coalesce(array_agg(d.destination) filter (where k.held), '{}')
    into matched, v_lanes, v_destinations
    from wh_dead_letter d
    left join wh_parked k
        on k.lane_id = d.lane_id and k.destination = d.destination and k.held and k.stream_seq = d.stream_seq
    where d.dead_letter_id = any (v_ids);
    released := cardinality(v_lanes);
    if p_dry_run or matched = 0 then
        return;
    end if;
    released := release_lanes(v_lanes, v_destinations);
    delete from wh_dead_letter d where d.dead_letter_id = any (v_ids);
    get diagnostics discarded = row_count;
end
$$;

CREATE FUNCTION corelane.discard_inbox_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_consumer text DEFAULT NULL::text, p_source text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT matched integer, OUT discarded integer, OUT released integer, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_ids int8[];
begin
    discarded := 0;
    select t.ids, t.more into v_ids, more from wh_take_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type,
        p_reason, p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;
    if not p_dry_run then
        perform from wh_inbox_parked k
        where (k.consumer, k.lane_id) in (
            select d.consumer, d.lane_id from wh_inbox_dead_letter d where d.dead_letter_id = any (v_ids))
        order by k.consumer, k.lane_id
        for update;
    end if;
    -- A later statement than the locks.
    select count(*), count(k.lane_id)
    into matched, released
    from wh_inbox_dead_letter d
    left join wh_inbox_parked k
        on k.consumer = d.consumer and k.lane_id = d.lane_id and k.held and k.message_id = d.message_id
    where d.dead_letter_id = any (v_ids);
    if p_dry_run or matched = 0 then
        return;
    end if;
    -- The next claim frees the lane if nothing waits in it.
    update wh_inbox_parked k
    set held = false, due = clock_timestamp(), attempts = 0, reason = 0, error = '', error_cut = false
    from wh_inbox_dead_letter d
    where d.dead_letter_id = any (v_ids) and k.consumer = d.consumer and k.lane_id = d.lane_id and k.held
        and k.message_id = d.message_id;
    delete from wh_inbox_dead_letter d where d.dead_letter_id = any (v_ids);
    get diagnostics discarded = row_count;
end
$$;

CREATE FUNCTION corelane.end_work(p_instance_id uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_number int4;
    v_alive bool;
begin
    select i.number into v_number from wh_instance i where i.id = p_instance_id and not i.direct and i.shards = 1;
    if not found then
        return false;
    end if;
    perform pg_advisory_xact_lock(wh_lock_class(3), v_number);
    v_alive := exists (select from wh_instance i where i.number = v_number and i.state = 0);
    if v_alive then
        perform wh_hand_out(v_number, 1000, 0, 1, 1);
    end if;
    perform deregister_instance(v_number);
    delete from wh_handed_out h where h.incarnation = v_number;
    return v_alive;
end
$$;

CREATE FUNCTION corelane.erase_events(p_stream_ids uuid[], p_versions bigint[] DEFAULT NULL::bigint[], p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT events bigint, OUT messages bigint, OUT dead_letters bigint, OUT inbox bigint, OUT more boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $_$
#variable_conflict use_column
declare
    v_whole uuid[];
    v_streams uuid[];
    v_versions int8[];
    v_partitions int4[];
    v_table record;
    v_statement text;
    v_count int8;
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    perform wh_require('elements of p_stream_ids', cardinality(p_stream_ids), 1, 1000);
    perform wh_require('elements of p_versions', coalesce(cardinality(p_versions), cardinality(p_stream_ids)),
        cardinality(p_stream_ids), cardinality(p_stream_ids));
    if array_position(p_stream_ids, null) is not null then
        raise exception 'an element of p_stream_ids is null' using errcode = '22023';
    end if;
    select coalesce(array_agg(distinct s.id) filter (where s.version is null), '{}'),
        coalesce(array_agg(s.id order by s.id, s.version) filter (where s.version is not null), '{}'),
        coalesce(array_agg(s.version order by s.id, s.version) filter (where s.version is not null), '{}'),
        array_agg(distinct compute_partition(s.id, i.partition_count))
    into v_whole, v_streams, v_versions, v_partitions
    from (select distinct u.id, u.version from unnest(p_stream_ids, p_versions) u(id, version)) s
    cross join wh_installation i;

    if not p_dry_run then
        -- Nobody copies a body from here to there meanwhile: in the order of other operators.
        perform from wh_dead_letter d where d.lane_id = any (p_stream_ids) or d.stream_id = any (p_stream_ids)
        order by d.dead_letter_id for update;
        perform from wh_inbox_dead_letter d where d.stream_id = any (p_stream_ids) order by d.dead_letter_id for update;
        perform wh_lock_owners(v_partitions);
        perform from wh_partition p where p.partition = any (v_partitions) and p.owner is null
        order by p.partition for update;
    end if;

    events := 0;
    messages := 0;
    dead_letters := 0;
    inbox := 0;
    more := false;
    -- Later statements than the locks, in the way that bodies go.
    for v_table in
        select * from (values
            (1, 'wh_scheduled', 't.stream_id', false, 'true'),
            (2, 'wh_event_store', 't.stream_id', true, 'true'),
            (3, 'wh_outbox', 't.lane_id', false, 't.stream_id is not null'),
            (4, 'wh_parked_reference', 'coalesce(t.stream_id, t.lane_id)', true, 't.payload is not null'),
            (5, 'wh_dead_letter', 'coalesce(t.stream_id, t.lane_id)', true, 'true'),
            (6, 'wh_inbox', 't.stream_id', false, 'true'),
            (7, 'wh_inbox_dead_letter', 't.stream_id', false, 'true')) t(turn, name, stream, has_versions, fits)
        order by turn
    loop
        v_statement := format('select t.tableoid as part, t.ctid as place from %1$s t where %2$s = any ($1) and %3$s'
            ' and (t.content_type is distinct from $4 or octet_length(t.payload) > 0 or t.metadata is not null)', v_table.name, v_table.stream, v_table.fits);
        if v_table.has_versions then
            v_statement := v_statement || format(' union all select t.tableoid, t.ctid from unnest($2, $3) s(id, version)'
                ' join %1$s t on %2$s = s.id and t.version = s.version where %3$s'
                ' and (t.content_type is distinct from $4 or octet_length(t.payload) > 0 or t.metadata is not null)'
                ' and not s.id = any ($1)',
                v_table.name, v_table.stream, v_table.fits);
        end if;
        if p_dry_run then
            v_statement := format('select count(*) from (%s) p', v_statement);
        else
            v_statement := format('with page as materialized (select * from (%2$s) p limit $5), erased as ('
                'update %1$s t set content_type = $4, metadata = null, payload = case when t.payload is not null then $6 end'
                ' from page p where t.tableoid = p.part and t.ctid = p.place returning 1) select count(*) from erased',
                v_table.name, v_statement);
        end if;
        execute v_statement into v_count using v_whole, v_streams, v_versions, 'application/vnd.corelane.erased'::text,
            p_rows_max, ''::bytea;
        case
            when v_table.turn = 2 then events := v_count;
            when v_table.turn = 5 then dead_letters := v_count;
            when v_table.turn > 5 then inbox := inbox + v_count;
            else messages := messages + v_count;
        end case;
        more := more or not p_dry_run and v_count >= p_rows_max;
    end loop;
end
$_$;

CREATE FUNCTION corelane.expect_versions(stream_ids uuid[], expected_versions bigint[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
declare
    v_partition_count int4;
    v_wrong record;
    v_stream uuid[];
    v_seq int8[];
    v_version int8[];
begin
    if cardinality(stream_ids) is distinct from cardinality(expected_versions) then
        raise exception 'stream_ids has % elements, expected_versions has %: give each stream one', 
            coalesce(cardinality(stream_ids), 0), coalesce(cardinality(expected_versions), 0) using errcode = '22023';
    end if;
    select s.turn, s.id, s.expected into v_wrong
    from unnest(stream_ids, expected_versions) with ordinality s(id, expected, turn)
    where s.id is null or s.id = '00000000-0000-0000-0000-000000000000' or s.expected < 0
    order by s.turn limit 1;
    if found then
        raise exception 'element %: stream % with expected version %: a stream has an id that is not nil, and a version of 0 or more',
            v_wrong.turn, v_wrong.id, v_wrong.expected using errcode = '22023';
    end if;
    select i.partition_count into strict v_partition_count from wh_installation i;
    if (select count(*) from (select distinct s.id from unnest(stream_ids) s(id) limit 257) s) > 256 then
        perform pg_advisory_xact_lock(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition from unnest(stream_ids) s(id) order by 1
        ) p;
    else
        perform pg_advisory_xact_lock_shared(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition from unnest(stream_ids) s(id) order by 1
        ) p;
        perform pg_advisory_xact_lock(wh_lock_class(2), s.key) from (
            select distinct wh_stream_key(s.id) as key from unnest(stream_ids) s(id) order by 1
        ) s;
    end if;

    -- A later statement than the locks.
    select array_agg(s.id), array_agg(s.version), array_agg(greatest(s.event_seq,
        (select o.stream_seq from wh_outbox_0 o where o.lane_id = s.id order by o.stream_seq desc limit 1),
        (select o.stream_seq from wh_outbox_1 o where o.lane_id = s.id order by o.stream_seq desc limit 1),
        (select o.stream_seq from wh_outbox_2 o where o.lane_id = s.id order by o.stream_seq desc limit 1),
        (select c.last_seq from wh_stream c where c.stream_id = s.id)))
    into v_stream, v_version, v_seq
    from (
        select d.id, coalesce(e.version, 0) as version, coalesce(e.stream_seq, 0) as event_seq
        from (select distinct s.id from unnest(stream_ids, expected_versions) s(id, expected) where s.expected is not null) d
        left join lateral (
            select e.version, e.stream_seq from wh_event_store e where e.stream_id = d.id order by e.version desc limit 1
        ) e on true
    ) s;
    if v_stream is not null and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        perform wh_prove_last(v_stream, v_seq, v_version);
    end if;
    select s.id, s.expected, f.version into v_wrong
    from unnest(stream_ids, expected_versions) with ordinality s(id, expected, turn)
    join unnest(v_stream, v_version) f(id, version) on f.id = s.id
    where s.expected <> f.version
    order by s.turn limit 1;
    if found then
        raise exception 'stream % is at version %, expected was %', v_wrong.id, v_wrong.version, v_wrong.expected
            using errcode = 'CL010', hint = 'Read the stream and decide anew.',
            detail = format('stream_id=%s expected=%s found=%s', v_wrong.id, v_wrong.expected, v_wrong.version);
    end if;
end
$$;

CREATE FUNCTION corelane.fail_outbox_messages(p_instance_id uuid, p_message_ids uuid[], p_destinations text[] DEFAULT NULL::text[], p_reasons integer[] DEFAULT NULL::integer[], p_errors text[] DEFAULT NULL::text[], p_attempts_max integer DEFAULT 10, p_retry_base_ms bigint DEFAULT 30000, p_retry_cap_ms bigint DEFAULT 300000, p_lease_seconds integer DEFAULT 30, p_hold_destinations text[] DEFAULT '{}'::text[], OUT lease_lost boolean, OUT failed integer, OUT dead integer, OUT unknown integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    perform wh_require('length of p_message_ids', coalesce(cardinality(p_message_ids), 0), 0, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select f.* into failed, dead, unknown
        from wh_fail_work(v_incarnation, p_message_ids, p_destinations, p_reasons, p_errors, false, p_attempts_max,
            p_retry_base_ms, p_retry_cap_ms, p_hold_destinations) f;
        perform wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, 0, 1, 1);
    end if;
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

CREATE FUNCTION corelane.finish_inbox(p_consumer smallint, p_message_ids uuid[]) RETURNS boolean[]
    LANGUAGE sql
    AS $$
    with given as (
        select g.message_id, g.turn, row_number() over (partition by g.message_id order by g.turn) as nth
        from unnest(p_message_ids) with ordinality g(message_id, turn)
    ), locked as materialized (
        select i.ctid as place, i.message_id from "corelane".wh_inbox i
        where i.consumer = p_consumer and i.message_id = any (p_message_ids)
        order by i.message_id
        for update
    ), gone as (
        delete from "corelane".wh_inbox i
        using locked l
        where i.ctid = l.place and i.consumer = p_consumer and i.message_id = l.message_id
        returning i.message_id
    )
    select coalesce(array_agg(d.message_id is not null and g.nth = 1 order by g.turn), '{}')
    from given g
    left join gone d on d.message_id = g.message_id
$$;

CREATE FUNCTION corelane.heartbeat(p_instance_id uuid, p_service_name text, p_host_name text DEFAULT ''::text, p_process_id integer DEFAULT 0, p_lease_seconds integer DEFAULT 30, p_owns boolean DEFAULT true, OUT lease_lost boolean, OUT lease_until timestamp with time zone, OUT partitions integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    v_incarnation := wh_begin_work(p_instance_id, coalesce(p_service_name, ''), p_host_name || ':' || p_process_id,
        p_lease_seconds * 1000::int8, case when p_owns then null else false end);
    lease_lost := v_incarnation is null;
    select i.lease_until into lease_until from wh_instance i where i.number = v_incarnation;
    partitions := (select count(*) from wh_partition p where p.owner = v_incarnation);
end
$$;

CREATE FUNCTION corelane.hold_instance(p_incarnation integer) RETURNS boolean
    LANGUAGE sql
    AS $$
    select pg_try_advisory_lock("corelane".wh_lock_class(4), p_incarnation)
$$;

CREATE FUNCTION corelane.inbox_statistics(OUT consumers integer, OUT days integer, OUT days_skipped integer, OUT oldest_day integer, OUT seen_bytes bigint, OUT timeless_rows bigint, OUT other_rows bigint, OUT kept bigint, OUT kept_bytes bigint, OUT parked bigint, OUT held bigint, OUT overdue bigint, OUT oldest_parked_ms bigint, OUT dead_letters bigint) RETURNS record
    LANGUAGE sql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
    select
        (select count(*)::int4 from wh_consumer),
        p.days, p.days_skipped, p.oldest_day,
        (select sum(pg_total_relation_size(t.relid))::int8 from pg_partition_tree('wh_inbox_seen'::regclass) t where t.isleaf),
        (select greatest(c.reltuples, 0)::int8 from pg_class c where c.oid = 'wh_inbox_seen_timeless'::regclass),
        (select sum(greatest(c.reltuples, 0))::int8 from pg_class c
            where c.oid in ('wh_inbox_seen_other'::regclass, 'wh_inbox_seen_misdated'::regclass)),
        (select count(*) from wh_inbox), pg_total_relation_size('wh_inbox'::regclass),
        k.parked, k.held, k.overdue, k.oldest_parked_ms,
        (select count(*) from wh_inbox_dead_letter)
    from (
        select count(*) filter (where p.is_made)::int4 as days, count(*) filter (where not p.is_made)::int4 as days_skipped,
            min(p.day) filter (where p.is_made) as oldest_day
        from wh_inbox_part p
    ) p, (
        select count(*) as parked, count(*) filter (where k.held) as held,
            count(*) filter (where k.due < clock_timestamp() - interval '1 minute') as overdue,
            (extract(epoch from clock_timestamp() - min(k.parked_at)) * 1000)::int8 as oldest_parked_ms
        from wh_inbox_parked k
    ) k
$$;

CREATE FUNCTION corelane.inspect(p_incarnation integer, p_dead_letters_days integer, p_unpublished_ms bigint, p_stuck_ms bigint, OUT inspected boolean, OUT dead_letters_trimmed integer, OUT unpublished integer, OUT unpublished_age_ms bigint, OUT overdue integer, OUT stuck integer, OUT stuck_age_ms bigint, OUT held integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
begin
    dead_letters_trimmed := 0;
    inspected := pg_try_advisory_xact_lock(wh_lock_class(6), 2);
    if not inspected then
        return;
    end if;
    -- A later statement than the lock.
    update wh_inspection s
    set inspector = p_incarnation, inspected_at = clock_timestamp()
    where p_incarnation in (select i.number from wh_instance i where i.state = 0 and i.lease_until > clock_timestamp())
        and (s.inspector = p_incarnation or s.inspected_at < clock_timestamp() - interval '150 s'
            or s.inspector not in (
                select i.number from wh_instance i where i.state = 0 and i.lease_until > clock_timestamp()));
    inspected := found;
    if not inspected then
        return;
    end if;
    if p_dead_letters_days > 0 then
        delete from wh_dead_letter d
        using (
            select l.dead_letter_id
            from wh_dead_letter l
            where l.dead_letter_id = any (array(
                select o.dead_letter_id
                from (select d.* from wh_dead_letter d order by d.dead_letter_id limit 10000) o
                where o.dead_at < clock_timestamp() - p_dead_letters_days * interval '1 day'
                    and not exists (
                        select from wh_parked k
                        where k.lane_id = o.lane_id and k.destination = o.destination and k.held
                            and k.stream_seq = o.stream_seq)
                order by o.dead_letter_id
                limit 1000))
            for update skip locked
        ) old
        where d.dead_letter_id = old.dead_letter_id;
        get diagnostics dead_letters_trimmed = row_count;
    end if;
    select s.* into unpublished, unpublished_age_ms, overdue, stuck, stuck_age_ms, held
    from wh_sentinel(p_unpublished_ms, p_stuck_ms) s;
end
$$;

CREATE FUNCTION corelane.inspect_work(p_instance_id uuid, p_dead_letters_days integer, p_unpublished_ms bigint DEFAULT 60000, p_stuck_ms bigint DEFAULT 3600000, p_lease_seconds integer DEFAULT 30, OUT lease_lost boolean, OUT inspected boolean, OUT dead_letters_trimmed integer, OUT unpublished integer, OUT unpublished_age_ms bigint, OUT overdue integer, OUT stuck integer, OUT stuck_age_ms bigint, OUT held integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    perform wh_require('p_dead_letters_days', p_dead_letters_days, 0, 36500);
    perform wh_require('p_unpublished_ms', p_unpublished_ms, 1, 31536000000);
    perform wh_require('p_stuck_ms', p_stuck_ms, 1, 31536000000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select i.inspected, i.dead_letters_trimmed, i.unpublished, i.unpublished_age_ms, i.overdue, i.stuck,
            i.stuck_age_ms, i.held
        into inspected, dead_letters_trimmed, unpublished, unpublished_age_ms, overdue, stuck, stuck_age_ms, held
        from inspect(v_incarnation, p_dead_letters_days, p_unpublished_ms, p_stuck_ms) i;
    end if;
end
$$;

CREATE FUNCTION corelane.join_subscription(p_name text, p_incarnation integer, p_from bigint DEFAULT 0, OUT subscription integer, OUT created boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_edge pg_snapshot;
    v_floor int8;
    v_rebased int8;
begin
    if p_from < 0 then
        raise exception 'a position is 0 (the beginning) or more, not %', p_from using errcode = '22023';
    end if;
    select s.subscription into subscription from wh_subscription s where s.name = p_name for key share;
    created := false;
    if not found then
        -- Before this transaction has an id.
        select e.edge, greatest(e.floor, 0) into v_edge, v_floor from wh_read_edge() e;
        insert into wh_subscription as s (name, started_at) values (p_name, coalesce(p_from, 0))
        on conflict (name) do nothing
        returning s.subscription into subscription;
        created := found;
    end if;
    if created then
        select i.rebased_position into strict v_rebased from wh_installation i;
        insert into wh_subscription_partition (subscription, partition, resolved, floor, before_from)
        select subscription, p.partition, case when p_from is null then v_edge else '1:1:' end,
            case when p_from is null then v_floor else greatest(p_from, v_rebased) end,
            case when p_from is null then v_rebased else p_from end
        from wh_partition p;
    elsif subscription is null then
        select s.subscription into strict subscription from wh_subscription s where s.name = p_name for key share;
    end if;
    insert into wh_subscription_member (subscription, incarnation) values (subscription, p_incarnation)
    on conflict do nothing;
    perform pg_notify(wh_subscription_channel(), subscription::text);
end
$$;

CREATE FUNCTION corelane.keep_inbox(p_consumer smallint, p_source text, p_lane_ids uuid[], p_message_ids uuid[], p_stream_ids uuid[], p_type_names text[], p_payloads bytea[], p_content_types text[] DEFAULT NULL::text[], p_metadata bytea[] DEFAULT NULL::bytea[], p_correlation_ids uuid[] DEFAULT NULL::uuid[], p_causation_ids uuid[] DEFAULT NULL::uuid[], p_trace_ids uuid[] DEFAULT NULL::uuid[], p_span_ids bigint[] DEFAULT NULL::bigint[], p_trace_flags smallint[] DEFAULT NULL::smallint[]) RETURNS integer
    LANGUAGE sql
    AS $$
    with given as (
        select m.* from unnest(p_lane_ids, p_message_ids, p_stream_ids, p_type_names, p_payloads, p_content_types,
            p_metadata, p_correlation_ids, p_causation_ids, p_trace_ids, p_span_ids, p_trace_flags) with ordinality
            m(lane_id, message_id, stream_id, type_name, payload, content_type, metadata, correlation_id, causation_id,
            trace_id, span_id, trace_flags, turn)
    ), parked as (
        insert into "corelane".wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
        select distinct on (m.lane_id) clock_timestamp(), m.lane_id, m.message_id,
            "corelane".compute_partition(m.lane_id, (select i.partition_count from "corelane".wh_installation i)), 0,
            p_consumer, 0
        from given m
        order by m.lane_id, m.turn
        -- Locks the row that is there, and changes nothing.
        on conflict (consumer, lane_id) do update set due = k.due where false
    ), kept as (
        insert into "corelane".wh_inbox (span_id, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id,
            consumer, trace_flags, source, type_name, content_type, metadata, payload)
        select m.span_id, m.lane_id, m.stream_id, m.message_id, m.correlation_id, m.causation_id, m.trace_id,
            p_consumer, m.trace_flags, p_source, m.type_name, m.content_type, m.metadata, m.payload
        from given m
        order by m.turn
        on conflict (consumer, message_id) do nothing
        returning 1
    )
    select count(*)::int4 from kept
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

CREATE FUNCTION corelane.leave_subscription(p_subscription integer, p_incarnation integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_count int4;
begin
    delete from wh_subscription_member m where m.subscription = p_subscription and m.incarnation = p_incarnation;
    update wh_subscription_partition p set owner = null, fence = p.fence + 1, updated_at = clock_timestamp()
    where p.subscription = p_subscription and p.owner = p_incarnation;
    get diagnostics v_count = row_count;
    perform pg_notify(wh_subscription_channel(), p_subscription::text);
    return v_count;
end
$$;

CREATE FUNCTION corelane.list_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_destination text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 100) RETURNS TABLE(dead_letter_id bigint, dead_at timestamp with time zone, destination text, lane_id uuid, stream_id uuid, stream_seq bigint, version bigint, message_id uuid, type_name text, attempts integer, retried integer, reason smallint, error text, error_cut boolean, error_fingerprint text, holds boolean, is_stored boolean)
    LANGUAGE sql STABLE
    AS $$
    select d.dead_letter_id, d.dead_at, d.destination, d.lane_id, d.stream_id, d.stream_seq, d.version, d.message_id,
        d.type_name, d.attempts, d.retried, d.reason, d.error, d.error_cut, d.error_fingerprint,
        exists (select from "corelane".wh_parked k where k.lane_id = d.lane_id and k.destination = d.destination
            and k.held and k.stream_seq = d.stream_seq),
        case when d.version = 0 or d.payload is not null then d.payload is not null else exists (
            select from "corelane".wh_event_store e where e.stream_id = d.lane_id and e.version = d.version) end
    from "corelane".wh_match_dead_letters(p_all, p_ids, p_destination, p_type, p_reason, p_fingerprint, p_stream,
        p_dead_from, p_dead_before, p_after, p_rows_max) m
    join "corelane".wh_dead_letter d on d.dead_letter_id = m.dead_letter_id
    order by d.dead_letter_id
$$;

CREATE FUNCTION corelane.list_inbox_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_consumer text DEFAULT NULL::text, p_source text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 100) RETURNS TABLE(dead_letter_id bigint, dead_at timestamp with time zone, consumer text, source text, lane_id uuid, stream_id uuid, message_id uuid, received_at timestamp with time zone, type_name text, attempts integer, retried integer, reason smallint, error text, error_cut boolean, error_fingerprint text, holds boolean)
    LANGUAGE sql STABLE
    AS $$
    select d.dead_letter_id, d.dead_at, c.name, d.source, d.lane_id, d.stream_id, d.message_id, d.received_at,
        d.type_name, d.attempts, d.retried, d.reason, d.error, d.error_cut, d.error_fingerprint,
        exists (select from "corelane".wh_inbox_parked k where k.consumer = d.consumer and k.lane_id = d.lane_id
            and k.held and k.message_id = d.message_id)
    from "corelane".wh_match_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type, p_reason, p_fingerprint,
        p_stream, p_dead_from, p_dead_before, p_after, p_rows_max) m
    join "corelane".wh_inbox_dead_letter d on d.dead_letter_id = m.dead_letter_id
    join "corelane".wh_consumer c on c.consumer = d.consumer
    order by d.dead_letter_id
$$;

CREATE FUNCTION corelane.listen_instance() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    execute format('listen %I', wh_channel());
    execute format('listen %I', wh_channel() || '_' || pg_backend_pid());
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

CREATE FUNCTION corelane.lock_inbox(p_consumer smallint, p_lane_ids uuid[], p_message_ids uuid[]) RETURNS integer
    LANGUAGE sql
    AS $$
    with parked as (
        insert into "corelane".wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
        select distinct on (m.lane_id) clock_timestamp(), m.lane_id, m.message_id,
            "corelane".compute_partition(m.lane_id, (select i.partition_count from "corelane".wh_installation i)), 0,
            p_consumer, 0
        from unnest(p_lane_ids, p_message_ids) with ordinality m(lane_id, message_id, turn)
        order by m.lane_id, m.turn
        -- Locks the row that is there, and changes nothing.
        on conflict (consumer, lane_id) do update set due = k.due where false
        returning 1
    )
    select count(*)::int4 from parked
$$;

CREATE FUNCTION corelane.maintain_inbox(p_window interval, p_days_ahead integer DEFAULT 3, OUT made integer, OUT skipped integer, OUT truncated integer, OUT dropped integer, OUT blocked boolean, OUT more boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $_$
declare
    v_limit constant timestamptz := clock_timestamp() - p_window;
    v_until constant timestamptz := clock_timestamp() + interval '50 ms';
    v_last constant int4 := extract(epoch from clock_timestamp() - p_window)::int8 / 86400 - 1;
    v_day int4;
    v_at int4;
    v_blocks int4;
    v_used bool;
    v_alone bool;
    v_part text;
    v_gone int8;
begin
    truncated := 0;
    dropped := 0;
    blocked := false;
    more := false;
    if p_window is null or p_window < interval '1 hour' then
        raise exception 'p_window = %: at least an hour', p_window using errcode = '22023';
    end if;
    select m.made, m.skipped into made, skipped from wh_make_inbox_days(p_days_ahead) m;
    if not pg_try_advisory_xact_lock(wh_lock_class(6), 3) then
        return;
    end if;

    -- A day's ids are received on it or later, but for fast clocks: an older day may be over, a younger one is not.
    for v_day, v_at in
        select p.day, p.summarized_to from wh_inbox_part p where p.day <= v_last and p.is_made order by p.day
    loop
        -- The index knows nothing of the newest blocks before they are summarized, and they would be read each time.
        v_blocks := pg_relation_size(format('wh_inbox_seen_%s', v_day)::regclass) / current_setting('block_size')::int4;
        while v_at < v_blocks and clock_timestamp() < v_until loop
            perform brin_summarize_range(i.indexrelid, v_at)
            from pg_index i
            join pg_class c on c.oid = i.indexrelid
            join pg_am a on a.oid = c.relam and a.amname = 'brin'
            where i.indrelid = format('wh_inbox_seen_%s', v_day)::regclass;
            v_at := v_at + 64;
            more := true;
        end loop;
        if more then
            update wh_inbox_part p set summarized_to = least(v_at, greatest(v_blocks - 64, 0)) where p.day = v_day;
        end if;
        exit when v_at < v_blocks;
        execute format('select exists (select from wh_inbox_seen_%s s where s.received_at >= $1)', v_day)
        into v_used using v_limit;
        more := false;
        continue when v_used;

        begin
            lock table only wh_inbox_seen, wh_inbox_seen_other in access exclusive mode nowait;
            execute format('lock table wh_inbox_seen_%s in access exclusive mode nowait', v_day);
            v_alone := false;
        exception when lock_not_available then
            blocked := true;
            v_alone := true;
        end;
        begin
            if v_alone then
                execute format('select exists (select from wh_inbox_seen_%s)', v_day) into v_used;
                continue when not v_used;
                execute format('lock table wh_inbox_seen_%s in access exclusive mode nowait', v_day);
            end if;
            -- A later statement than the lock.
            execute format('select exists (select from wh_inbox_seen_%s s where s.received_at >= $1)', v_day)
            into v_used using v_limit;
            continue when v_used;
            if v_alone then
                execute format('truncate wh_inbox_seen_%s', v_day);
                update wh_inbox_part p set summarized_to = 0 where p.day = v_day;
                truncated := truncated + 1;
            else
                execute format('drop table wh_inbox_seen_%s', v_day);
                delete from wh_inbox_part p where p.day = v_day;
                dropped := dropped + 1;
            end if;
            more := true;
            exit;
        exception when lock_not_available then
            null;
        end;
    end loop;
    foreach v_part in array array['wh_inbox_seen_misdated', 'wh_inbox_seen_other'] loop
        execute format('delete from %1$s s where s.ctid = any (array(
            select o.ctid from %1$s o where o.received_at < $1 order by o.received_at limit 1000))', v_part)
        using v_limit;
        get diagnostics v_gone = row_count;
        more := more or v_gone = 1000;
    end loop;
    -- Days that never had a part are over too.
    delete from wh_inbox_part p where p.day <= v_last and not p.is_made;
end
$_$;

CREATE FUNCTION corelane.maintain_work(p_instance_id uuid, p_lease_seconds integer DEFAULT 30, OUT lease_lost boolean, OUT truncated integer, OUT rotated boolean, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select m.truncated, m.rotated, m.more into truncated, rotated, more from perform_maintenance(v_incarnation) m;
    end if;
end
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

CREATE FUNCTION corelane.measure_subscription(p_name text, p_events_max integer DEFAULT 1000000, OUT events bigint, OUT oldest_age_ms bigint, OUT members integer, OUT partitions_free integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
#variable_conflict use_column
declare
    v_subscription int4;
    v_started int8;
    v_rebased int8;
    v_low int8;
    v_late int8[];
    v_now pg_snapshot := pg_current_snapshot();
    v_oldest timestamptz;
begin
    select s.subscription, s.started_at into v_subscription, v_started from wh_subscription s where s.name = p_name;
    if not found then
        return;
    end if;
    select i.rebased_position into strict v_rebased from wh_installation i;
    select count(*) into members from wh_subscription_member m where m.subscription = v_subscription;
    select count(*) filter (where p.owner is null),
        min(case when p.before_from < v_rebased then p.before_from else p.floor end)
    into partitions_free, v_low
    from wh_subscription_partition p where p.subscription = v_subscription;
    v_low := greatest(v_low, v_started);
    select array_agg(distinct x::text::int8) into v_late
    from wh_subscription_partition p
    cross join lateral pg_snapshot_xip(p.resolved) x
    where p.subscription = v_subscription and pg_visible_in_snapshot(x, v_now);
    select count(*), min(u.stored_at) into events, v_oldest
    from (
        select e.stored_at
        from (
            select e.position, e.xid, e.partition, e.stored_at from wh_event_store e where e.position > v_low
            union all
            select e.*
            from unnest(v_late) x
            cross join lateral (
                select e.position, e.xid, e.partition, e.stored_at
                from wh_event_store e where e.xid = x and e.position + 0 <= v_low and e.position + 0 > v_started
            ) e
        ) e
        join wh_subscription_partition p on p.subscription = v_subscription and p.partition = e.partition
        where case
            when e.position > v_rebased then not pg_visible_in_snapshot(e.xid::text::xid8, p.resolved)
                and (p.target is null or e.position > p.position
                    or not pg_visible_in_snapshot(e.xid::text::xid8, p.target))
            else p.before_from < v_rebased and e.position > p.before_from and (p.target is null or e.position > p.position)
                and not pg_visible_in_snapshot(e.xid::text::xid8, p.before_resolved)
                and (p.before_target is null or e.position > p.before_position
                    or not pg_visible_in_snapshot(e.xid::text::xid8, p.before_target))
        end
        limit p_events_max
    ) u;
    oldest_age_ms := coalesce(greatest(0, extract(epoch from clock_timestamp() - v_oldest) * 1000), 0)::int8;
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

CREATE FUNCTION corelane.move_to_dead_letters(p_instance_id uuid, p_message_ids uuid[], p_destinations text[] DEFAULT NULL::text[], p_reasons integer[] DEFAULT NULL::integer[], p_errors text[] DEFAULT NULL::text[], p_lease_seconds integer DEFAULT 30, OUT lease_lost boolean, OUT dead integer, OUT unknown integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    perform wh_require('length of p_message_ids', coalesce(cardinality(p_message_ids), 0), 0, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select f.dead, f.unknown into dead, unknown
        from wh_fail_work(v_incarnation, p_message_ids, p_destinations, p_reasons, p_errors, true, 1, 0, 0, '{}') f;
        perform wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, 0, 1, 1);
    end if;
end
$$;

CREATE FUNCTION corelane.park_inbox(p_consumer smallint, p_lane_ids uuid[], p_message_ids uuid[], p_attempts integer[], p_reasons smallint[], p_errors text[], p_due_in_ms bigint[]) RETURNS integer
    LANGUAGE sql
    AS $$
    with parked as (
        insert into "corelane".wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason,
            error_cut, error)
        select clock_timestamp() + m.due_in_ms * interval '1 ms', m.lane_id, m.message_id,
            "corelane".compute_partition(m.lane_id, (select i.partition_count from "corelane".wh_installation i)),
            m.attempts, p_consumer, m.reason, coalesce(octet_length(m.error) > 8192, false),
            "corelane".wh_cut_error(m.error)
        from unnest(p_lane_ids, p_message_ids, p_attempts, p_reasons, p_errors, p_due_in_ms)
            m(lane_id, message_id, attempts, reason, error, due_in_ms)
        order by m.lane_id
        on conflict (consumer, lane_id) do update
        set due = case when k.held then k.due else excluded.due end, message_id = excluded.message_id,
            attempts = excluded.attempts, reason = excluded.reason, error_cut = excluded.error_cut, error = excluded.error,
            leased_to = null, leased_through = null, leased_rows = null -- an earlier worker's, whose time was over
        returning 1
    )
    select count(*)::int4 from parked
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

    delete from wh_flush_given_up g
    using (
        select g.incarnation, g.shard from wh_flush_given_up g
        where g.given_up_at < clock_timestamp() - interval '1 day' limit 1000
    ) old
    where g.incarnation = old.incarnation and g.shard = old.shard;
    delete from wh_flush_truncated t
    using (
        select t.incarnation, t.shard from wh_flush_truncated t
        where not exists (select from wh_instance i where i.number = t.incarnation and i.state = 0) limit 1000
    ) old
    where t.incarnation = old.incarnation and t.shard = old.shard;

    -- Of workers that are gone. Their own last calls may be at it.
    delete from wh_handed_out h
    using (
        select h.ctid from wh_handed_out h
        where not exists (select from wh_instance i where i.number = h.incarnation and i.state = 0)
        limit 1000 for update skip locked
    ) old
    where h.ctid = old.ctid;
    delete from wh_worker_watch w
    using (
        select w.ctid from wh_worker_watch w
        where not exists (select from wh_instance i where i.number = w.incarnation and i.state = 0)
        limit 1000 for update skip locked
    ) old
    where w.ctid = old.ctid;

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

CREATE FUNCTION corelane.process_inbox_batch(p_worker uuid, p_consumer smallint, p_completions uuid[] DEFAULT '{}'::uuid[], p_failures uuid[] DEFAULT '{}'::uuid[], p_failure_reasons integer[] DEFAULT NULL::integer[], p_failure_errors text[] DEFAULT NULL::text[], p_renewals uuid[] DEFAULT '{}'::uuid[], p_new_messages uuid[] DEFAULT '{}'::uuid[], p_new_stream_ids uuid[] DEFAULT '{}'::uuid[], p_new_types text[] DEFAULT '{}'::text[], p_new_payloads bytea[] DEFAULT '{}'::bytea[], p_new_source text DEFAULT ''::text, p_new_content_types text[] DEFAULT NULL::text[], p_new_metadata bytea[] DEFAULT NULL::bytea[], p_new_correlation_ids uuid[] DEFAULT NULL::uuid[], p_new_causation_ids uuid[] DEFAULT NULL::uuid[], p_new_trace_ids uuid[] DEFAULT NULL::uuid[], p_new_span_ids bigint[] DEFAULT NULL::bigint[], p_new_trace_flags smallint[] DEFAULT NULL::smallint[], p_max_lanes integer DEFAULT 100, p_max_rows integer DEFAULT 200, p_max_bytes bigint DEFAULT 8388608, p_lease_seconds integer DEFAULT 30, p_attempts_max integer DEFAULT 10, p_retry_base_ms bigint DEFAULT 30000, p_retry_cap_ms bigint DEFAULT 300000, p_hold boolean DEFAULT false) RETURNS TABLE(source text, message_id uuid, state smallint, completed integer, failed integer, unknown integer, more boolean, lane_id uuid, stream_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, received_at timestamp with time zone, attempts integer, came_from text, type_name text, content_type text, metadata bytea, payload bytea)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
declare
    v_lease constant interval := p_lease_seconds * interval '1 second';
    v_reported constant uuid[] := coalesce(p_completions, '{}') || coalesce(p_failures, '{}') || coalesce(p_renewals, '{}');
    v_states int2[];
    v_new_lanes uuid[];
    v_row record;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception 'process_inbox_batch needs READ COMMITTED: what was decided before the lock must be seen'
            using errcode = '22023';
    end if;
    if p_worker is null or p_consumer is null then
        raise exception 'p_worker and p_consumer must not be null' using errcode = '22023';
    end if;
    perform wh_require('p_max_lanes', p_max_lanes, 0, 1000);
    perform wh_require('p_max_rows', p_max_rows, 1, 10000);
    perform wh_require('p_max_bytes', p_max_bytes, 1, 1073741824);
    perform wh_require('p_lease_seconds', p_lease_seconds, 1, 3600);
    perform wh_require('length of ' || a.name, coalesce(a.length, 0), 0, 10000)
    from (values ('p_completions', cardinality(p_completions)), ('p_failures', cardinality(p_failures)),
        ('p_renewals', cardinality(p_renewals)), ('p_new_messages', cardinality(p_new_messages))) a(name, length);

    if cardinality(v_reported) > 0 and cardinality(p_new_messages) > 0 then
        -- The lanes of both in one pass: an operator takes them in this order too. Whatever was received before is freed
        -- again below.
        v_new_lanes := array(
            select l.lane_id
            from (
                select distinct coalesce(m.stream_id, wh_lane(m.message_id)) as lane_id
                from unnest(p_new_messages, p_new_stream_ids) m(message_id, stream_id)
                where m.message_id is not null offset 0
            ) l
            where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, l.lane_id)));
        perform lock_inbox(p_consumer, coalesce(array_agg(l.lane_id), '{}'), coalesce(array_agg(l.lane_id), '{}'))
        from (
            select u.lane_id from unnest(v_new_lanes) u(lane_id)
            union
            select r.lane_id
            from (
                select distinct i.lane_id from wh_inbox i
                where i.consumer = p_consumer and i.message_id = any (v_reported) offset 0
            ) r
            where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, r.lane_id))
        ) l;
    end if;
    select d.completed, d.failed, d.unknown into completed, failed, unknown
    from wh_decide_inbox(p_worker, p_consumer, p_completions, p_failures, p_failure_reasons, p_failure_errors,
        p_renewals, v_lease, p_attempts_max, p_retry_base_ms, p_retry_cap_ms, p_hold) d;

    if coalesce(cardinality(p_new_messages), 0) > 0 then
        v_states := wh_receive_inbox(p_consumer, p_new_messages, p_new_stream_ids, p_new_types, p_new_payloads,
            p_new_source, p_new_content_types, p_new_metadata, p_new_correlation_ids, p_new_causation_ids,
            p_new_trace_ids, p_new_span_ids, p_new_trace_flags);
        delete from wh_inbox_parked k
        where k.consumer = p_consumer and k.lane_id = any (v_new_lanes) and not k.held
            and not exists (select from wh_inbox i where i.consumer = k.consumer and i.lane_id = k.lane_id);
        return query
        select 'new', n.message_id, n.state, null::int4, null::int4, null::int4, null::bool, null::uuid, null::uuid,
            null::uuid, null::uuid, null::uuid, null::int8, null::int2, null::timestamptz, null::int4, null::text,
            null::text, null::text, null::bytea, null::bytea
        from unnest(p_new_messages, v_states) with ordinality n(message_id, state, turn)
        order by n.turn;
    end if;

    select l.messages, l.more into v_row
    from wh_lease_inbox(p_worker, p_consumer, v_lease, p_max_lanes, p_max_rows, p_max_bytes) l;
    source := 'call';
    more := v_row.more;
    return next;
    return query
    select 'inbox', i.message_id, null::int2, null::int4, null::int4, null::int4, null::bool, i.lane_id, i.stream_id,
        i.correlation_id, i.causation_id, i.trace_id, i.span_id, i.trace_flags, i.received_at,
        case when k.message_id = i.message_id then k.attempts else 0 end, i.source, i.type_name, i.content_type,
        i.metadata, i.payload
    from unnest(v_row.messages) with ordinality m(message_id, turn)
    join wh_inbox i on i.consumer = p_consumer and i.message_id = m.message_id
    join wh_inbox_parked k on k.consumer = p_consumer and k.lane_id = i.lane_id
    order by m.turn;
end
$$;

CREATE FUNCTION corelane.process_work_batch(p_instance_id uuid, p_service_name text, p_host_name text DEFAULT ''::text, p_process_id integer DEFAULT 0, p_partition_count integer DEFAULT NULL::integer, p_lease_seconds integer DEFAULT 30, p_max_streams_per_batch integer DEFAULT 1000, p_outbox_completions uuid[] DEFAULT '{}'::uuid[], p_outbox_completion_destinations text[] DEFAULT NULL::text[], p_outbox_completion_statuses integer[] DEFAULT NULL::integer[], p_outbox_failures uuid[] DEFAULT '{}'::uuid[], p_outbox_failure_destinations text[] DEFAULT NULL::text[], p_outbox_failure_reasons integer[] DEFAULT NULL::integer[], p_outbox_failure_errors text[] DEFAULT NULL::text[], p_inbox_completions uuid[] DEFAULT '{}'::uuid[], p_inbox_failures uuid[] DEFAULT '{}'::uuid[], p_new_outbox_messages uuid[] DEFAULT '{}'::uuid[], p_new_outbox_stream_ids uuid[] DEFAULT '{}'::uuid[], p_new_outbox_types text[] DEFAULT '{}'::text[], p_new_outbox_payloads bytea[] DEFAULT '{}'::bytea[], p_new_outbox_is_event boolean[] DEFAULT '{}'::boolean[], p_new_outbox_destinations text[] DEFAULT '{}'::text[], p_new_outbox_reference_messages integer[] DEFAULT NULL::integer[], p_new_outbox_reference_destinations text[] DEFAULT NULL::text[], p_new_outbox_correlation_ids uuid[] DEFAULT NULL::uuid[], p_new_outbox_causation_ids uuid[] DEFAULT NULL::uuid[], p_new_outbox_trace_ids uuid[] DEFAULT NULL::uuid[], p_new_outbox_span_ids bigint[] DEFAULT NULL::bigint[], p_new_outbox_trace_flags smallint[] DEFAULT NULL::smallint[], p_new_outbox_content_types text[] DEFAULT NULL::text[], p_new_outbox_metadata bytea[] DEFAULT NULL::bytea[], p_new_outbox_dues timestamp with time zone[] DEFAULT NULL::timestamp with time zone[], p_new_inbox_messages uuid[] DEFAULT '{}'::uuid[], p_renew_outbox_lease_ids uuid[] DEFAULT '{}'::uuid[], p_renew_inbox_lease_ids uuid[] DEFAULT '{}'::uuid[], p_flags integer DEFAULT 0, p_max_rows integer DEFAULT 1000, p_max_rows_per_stream integer DEFAULT 100, p_attempts_max integer DEFAULT 10, p_retry_base_ms bigint DEFAULT 30000, p_retry_cap_ms bigint DEFAULT 300000, p_hold_destinations text[] DEFAULT '{}'::text[]) RETURNS TABLE(source text, lease_lost boolean, members integer, partitions integer, completed integer, failed integer, unknown integer, message_id uuid, destination text, stream_id uuid, stream_seq bigint, version bigint, "position" bigint, partition integer, fence bigint, attempts integer, status integer, flags integer, type_name text, content_type text, payload bytea, metadata bytea, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, stored_at timestamp with time zone)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_incarnation int4;
    v_completed record;
    v_failed record;
    v_handed record;
begin
    if p_flags & ~127 <> 0 or p_flags is null then
        raise exception 'flags %: the bits known are 1, 2, 4, 8, 16, 32 and 64', p_flags using errcode = '22023';
    end if;
    if p_partition_count <> (select i.partition_count from wh_installation i) then
        raise exception 'this schema was installed with % partitions, the call says %',
            (select i.partition_count from wh_installation i), p_partition_count
            using errcode = '22023', hint = 'The count is fixed at install: give that one, or null.';
    end if;
    if coalesce(cardinality(p_inbox_completions), 0) + coalesce(cardinality(p_inbox_failures), 0)
        + coalesce(cardinality(p_new_inbox_messages), 0) + coalesce(cardinality(p_renew_inbox_lease_ids), 0) > 0
    then
        raise exception 'what is received has a call of its own' using errcode = '0A000',
            hint = 'Leave the parameters of the inbox empty, and call process_inbox_batch in the same transaction.';
    end if;
    perform wh_require('p_max_streams_per_batch', p_max_streams_per_batch, 0, 1000000);
    perform wh_require('p_max_rows', p_max_rows, 1, 10000);
    perform wh_require('p_max_rows_per_stream', p_max_rows_per_stream, 1, 10000);
    perform wh_require('length of ' || a.name, coalesce(a.length, 0), 0, 10000)
    from (values ('p_outbox_completions', cardinality(p_outbox_completions)),
        ('p_outbox_failures', cardinality(p_outbox_failures)),
        ('p_new_outbox_messages', cardinality(p_new_outbox_messages)),
        ('p_renew_outbox_lease_ids', cardinality(p_renew_outbox_lease_ids))) a(name, length);

    v_incarnation := wh_begin_work(p_instance_id, coalesce(p_service_name, ''), p_host_name || ':' || p_process_id,
        p_lease_seconds * 1000::int8, p_max_streams_per_batch > 0);
    source := 'call';
    lease_lost := v_incarnation is null;
    if v_incarnation is not null then
        select c.* into v_completed from wh_complete_work(v_incarnation, p_outbox_completions,
            p_outbox_completion_destinations, p_outbox_completion_statuses) c;
        select f.* into v_failed from wh_fail_work(v_incarnation, p_outbox_failures, p_outbox_failure_destinations,
            p_outbox_failure_reasons, p_outbox_failure_errors, false, p_attempts_max, p_retry_base_ms, p_retry_cap_ms,
            p_hold_destinations) f;
        completed := v_completed.completed;
        failed := v_failed.failed + v_failed.dead;
        unknown := v_completed.unknown + v_failed.unknown;
    end if;

    if coalesce(cardinality(p_new_outbox_messages), 0) > 0 then
        return query
        select 'stored', lease_lost, null::int4, null::int4, null::int4, null::int4, null::int4, s.message_id,
            null::text, null::uuid, s.stream_seq, s.version, s.position, s.partition, null::int8, null::int4,
            case when s.version > 0 then 3 else 1 end, 0, null::text, null::text, null::bytea, null::bytea, null::uuid,
            null::uuid, null::uuid, null::int8, null::int2, null::timestamptz
        from store_outbox_messages(p_new_outbox_messages, p_new_outbox_stream_ids, p_new_outbox_types,
            p_new_outbox_payloads, p_new_outbox_is_event, p_new_outbox_destinations, p_new_outbox_reference_messages,
            p_new_outbox_reference_destinations, p_new_outbox_correlation_ids, p_new_outbox_causation_ids,
            p_new_outbox_trace_ids, p_new_outbox_span_ids, p_new_outbox_trace_flags, p_new_outbox_content_types,
            p_new_outbox_metadata, p_new_outbox_dues) s;
    end if;

    if v_incarnation is not null then
        update wh_handed_out h set handed_at = clock_timestamp()
        where h.incarnation = v_incarnation and h.message_id = any (p_renew_outbox_lease_ids) and not h.decided;
        select h.* into v_handed from wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, p_max_streams_per_batch,
            p_max_rows, p_max_rows_per_stream) h;
        members := v_handed.members;
        partitions := (select count(*) from wh_partition p where p.owner = v_incarnation);
    end if;
    return next;
    if v_incarnation is not null and (p_max_streams_per_batch > 0 or p_flags & 2 <> 0) then
        return query
        select 'outbox', false, null::int4, null::int4, null::int4, null::int4, null::int4, w.message_id, w.destination,
            w.stream_id, w.stream_seq, w.version, w.position, w.partition, w.fence, w.attempts, w.status,
            w.flags, w.type_name, w.content_type, w.payload, w.metadata,
            w.correlation_id, w.causation_id, w.trace_id, w.span_id, w.trace_flags, w.stored_at
        from wh_work_in_hand(v_incarnation, v_handed.handed_at, p_flags & 2 <> 0) w;
    end if;
end
$$;

CREATE FUNCTION corelane.queue_for_streams(p_incarnation integer, p_shard smallint, p_partitions integer[], p_streams uuid[], p_stream_partitions integer[], p_patience_ms integer) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
    v_lock_timeout constant text := current_setting('lock_timeout');
    v_queued bool;
begin
    perform pg_advisory_xact_lock_shared("corelane".wh_lock_class(3), p_incarnation);
    perform pg_advisory_xact_lock("corelane".wh_lock_class(7), "corelane".wh_flush_key(p_incarnation, p_shard));
    perform pg_advisory_xact_lock("corelane".wh_lock_class(5), p) from unnest(p_partitions) p;
    -- Keys of advisory locks are shown as oids, which have no sign.
    v_queued := exists (
        select
        from pg_locks l
        join unnest(p_streams) s(id) on l.objid = ("corelane".wh_stream_key(s.id)::int8 & 4294967295)::oid
        where l.locktype = 'advisory' and not l.granted and l.objsubid = 2
            and l.classid = ("corelane".wh_lock_class(2)::int8 & 4294967295)::oid
            and l.database = (select d.oid from pg_database d where d.datname = current_database()));
    begin
        perform set_config('lock_timeout',
            greatest(1, case when v_queued then p_patience_ms else p_patience_ms / 20 end)::text, true);
        perform pg_advisory_xact_lock_shared("corelane".wh_lock_class(1), p.partition)
        from (select distinct p as partition from unnest(p_stream_partitions) p order by 1) p;
        perform pg_advisory_xact_lock("corelane".wh_lock_class(2), s.key)
        from (select distinct "corelane".wh_stream_key(s) as key from unnest(p_streams) s order by 1) s;
    exception when lock_not_available then
        return false;
    end;
    perform set_config('lock_timeout', v_lock_timeout, true);
    return true;
end
$$;

CREATE FUNCTION corelane.read_feed(p_place text DEFAULT NULL::text, p_types text[] DEFAULT NULL::text[], p_prefixes text[] DEFAULT NULL::text[], p_rows_max integer DEFAULT 500, p_bytes_max bigint DEFAULT 4194304, p_prove_ms integer DEFAULT 1000) RETURNS TABLE(stream_id uuid, version bigint, stream_seq bigint, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, partition integer, type_name text, content_type text, metadata bytea, payload bytea, stored_at timestamp with time zone, "position" bigint, place text, whole boolean)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
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

CREATE FUNCTION corelane.read_stream(p_stream_id uuid, p_from bigint DEFAULT 1, p_backwards boolean DEFAULT false, p_rows_max integer DEFAULT 500, p_bytes_max bigint DEFAULT 4194304) RETURNS TABLE(version bigint, stream_seq bigint, "position" bigint, stored_at timestamp with time zone, message_id uuid, type_name text, content_type text, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, metadata bytea, payload bytea)
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
declare
    v_tombstone record;
begin
    -- Nothing is silently fewer. In the same snapshot as what is read.
    select t.first_version, t.note into v_tombstone
    from wh_tombstone t where t.stream_id = p_stream_id and t.first_version > p_from;
    if found then
        raise exception 'stream % begins at version %: what was before is truncated', p_stream_id,
            v_tombstone.first_version using errcode = 'CL030',
            detail = format('stream_id=%s first_version=%s', p_stream_id, v_tombstone.first_version),
            hint = coalesce(nullif(v_tombstone.note, ''), 'Read from that version on.');
    end if;
    if p_backwards then
        return query
        select p.version, p.stream_seq, p.position, p.stored_at, p.message_id, p.type_name, p.content_type,
            p.correlation_id, p.causation_id, p.trace_id, p.span_id, p.trace_flags, p.metadata, p.payload
        from (
            select e.*, sum(octet_length(e.payload) + coalesce(octet_length(e.metadata), 0)) over (order by e.version desc
                rows between unbounded preceding and 1 preceding) as before
            from (
                select * from wh_event_store e where e.stream_id = p_stream_id and e.version <= p_from
                order by e.version desc limit p_rows_max
            ) e
        ) p
        where coalesce(p.before, 0) < p_bytes_max
        order by p.version desc;
    else
        return query
        select p.version, p.stream_seq, p.position, p.stored_at, p.message_id, p.type_name, p.content_type,
            p.correlation_id, p.causation_id, p.trace_id, p.span_id, p.trace_flags, p.metadata, p.payload
        from (
            select e.*, sum(octet_length(e.payload) + coalesce(octet_length(e.metadata), 0)) over (order by e.version
                rows between unbounded preceding and 1 preceding) as before
            from (
                select * from wh_event_store e where e.stream_id = p_stream_id and e.version >= p_from
                order by e.version limit p_rows_max
            ) e
        ) p
        where coalesce(p.before, 0) < p_bytes_max
        order by p.version;
    end if;
end
$$;

CREATE FUNCTION corelane.read_subscription(p_subscription integer, p_partitions integer[], p_resolved pg_snapshot[], p_floor bigint, p_target pg_snapshot, p_target_floor bigint, p_position bigint, p_before boolean, p_ceiling bigint, p_window bigint, p_quiet boolean, p_types text[], p_prefixes text[], p_rows_max integer, p_bytes_max bigint) RETURNS TABLE(stream_id uuid, version bigint, stream_seq bigint, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, partition integer, type_name text, content_type text, metadata bytea, payload bytea, stored_at timestamp with time zone, "position" bigint, epoch uuid, whole boolean, target text, target_floor bigint, ceiling bigint, next_window bigint)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
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
        wh_parked_reference, wh_dead_letter, wh_stream, wh_segment, wh_rotation, wh_inspection,
        wh_handed_out, wh_worker_watch, wh_subscription, wh_subscription_member, wh_subscription_partition
        in access exclusive mode;
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
        -- Words to owners are left out: whoever begins anew finds what they were about beside the log.
        where u.stream_seq > 0
            and (o.born_here
                or not pg_visible_in_snapshot(o.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(o.xid::text::xid8, r.cursor))
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
            ('wh_scheduled', 'scheduled_id'), ('wh_subscription', 'subscription')) s(name, key)
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
    delete from wh_handed_out;
    delete from wh_worker_watch;
    update wh_inspection set inspector = 0, inspected_at = '-infinity';
    delete from wh_epoch;
    insert into wh_epoch default values;
    -- What subscriptions have read goes by the old ids for what is stored now, and begins anew for what comes. One that
    -- had not read everything from before the rebase before reads again what it had of that.
    delete from wh_subscription_member;
    update wh_subscription_partition p
    set owner = null, fence = p.fence + 1, floor = v_position + 4095, resolved = '1:1:', target = null, target_floor = 0,
        position = 0, before_from = case when p.before_from >= i.rebased_position then i.rebased_position
            else greatest(p.before_from, case when p.target is null then 0 else least(p.position, i.rebased_position) end)
        end,
        before_resolved = case when p.before_from >= i.rebased_position then p.resolved else '1:1:' end,
        before_target = case when p.before_from >= i.rebased_position then p.target end,
        before_position = case when p.before_from >= i.rebased_position then p.position else 0 end,
        before_is_foreign = v_other_server
    from wh_installation i;
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
begin
    select c.why_not, c.partition_count into v_why_not, partition_count from check_installation() c;
    if v_why_not is not null then
        raise exception '%', v_why_not using errcode = 'CL002';
    end if;
    if p_owns then
        perform wh_enter_service(p_service_name);
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

CREATE FUNCTION corelane.release_lanes(p_lanes uuid[], p_destinations text[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
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

CREATE FUNCTION corelane.release_subscription(p_subscription integer, p_incarnation integer, p_partitions integer[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_count int4;
begin
    update wh_subscription_partition p set owner = null, fence = p.fence + 1, updated_at = clock_timestamp()
    where p.subscription = p_subscription and p.owner = p_incarnation and p.partition = any (p_partitions);
    get diagnostics v_count = row_count;
    if v_count > 0 then
        perform pg_notify(wh_subscription_channel(), p_subscription::text);
    end if;
    return v_count;
end
$$;

CREATE FUNCTION corelane.remember_inbox(p_consumer smallint, p_message_ids uuid[], p_days integer[] DEFAULT NULL::integer[]) RETURNS boolean[]
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
declare
    v_today constant int4 := extract(epoch from clock_timestamp())::int8 / 86400;
    v_misdated int4[];
    v_only int4[];
    v_known uuid[] := '{}';
    v_days int4[] := p_days;
    v_is_apart bool := false;
    v_has_no_part bool;
    v_fresh uuid[];
    v_new bool[];
begin
    lock table only wh_inbox_seen in row exclusive mode;
    -- Later statements than the lock.
    if v_days is null then
        v_days := array(
            select coalesce(wh_inbox_day(g.id), -1)
            from unnest(p_message_ids) with ordinality g(id, turn) order by g.turn);
    end if;
    loop
        select coalesce(array_agg(d.day) filter (where d.place > 0), '{}'),
            coalesce(array_agg(d.day) filter (where d.place = 2), '{}'),
            coalesce(bool_or(d.day >= 0 and d.place < 2 and not d.has_part), false) and v_has_no_part is null
        into v_misdated, v_only, v_has_no_part
        from (
            select g.day, p.day is not null as has_part, wh_inbox_place(g.day, v_today, p.day is not null) as place
            from (select distinct u from unnest(v_days) u) g(day)
            left join wh_inbox_part p on p.day = g.day and p.is_made
        ) d;
        exit when not v_has_no_part;
        -- Into the default part: nobody makes the day's part meanwhile (the server would refuse the row). Looked at once
        -- more behind the lock: it may just have been made.
        lock table only wh_inbox_seen_other in row exclusive mode;
    end loop;
    if exists (select from wh_inbox_seen s where s.day = -2) then
        v_is_apart := true;
        v_known := array(
            select s.message_id from wh_inbox_seen s
            where s.day = -2 and s.consumer = p_consumer and s.message_id = any (p_message_ids));
    end if;
    if cardinality(v_only) > 0 then
        v_known := v_known || array(
            select s.message_id from wh_inbox_seen s
            where s.day = any (v_only) and s.consumer = p_consumer and s.message_id = any (p_message_ids));
    end if;
    if not v_is_apart and cardinality(v_misdated) = 0 then
        -- As a rule: nothing stands apart, and all are new.
        with written as (
            insert into wh_inbox_seen (received_at, message_id, day, consumer)
            select clock_timestamp(), g.id, g.day, p_consumer
            from unnest(p_message_ids, v_days) g(id, day)
            order by g.id
            on conflict do nothing
            returning message_id
        )
        select array_agg(w.message_id) into v_fresh from written w;
        if cardinality(v_fresh) = cardinality(p_message_ids) then
            return array_fill(true, array[cardinality(v_fresh)]);
        end if;
        return array(
            select w.id is not null and g.nth = 1
            from (
                select u.id, u.turn, row_number() over (partition by u.id order by u.turn) as nth
                from unnest(p_message_ids) with ordinality u(id, turn)
            ) g
            left join unnest(v_fresh) w(id) on w.id = g.id
            order by g.turn);
    end if;
    with given as (
        select g.message_id, g.day, g.turn, row_number() over (partition by g.message_id order by g.turn) as nth
        from unnest(p_message_ids, v_days) with ordinality g(message_id, day, turn)
    ), written as (
        insert into wh_inbox_seen (received_at, message_id, day, consumer)
        select clock_timestamp(), g.message_id, p.day, p_consumer
        from given g
        cross join lateral (
            values (g.day, g.day <> all (v_only)), (-2, g.day = any (v_misdated))
        ) p(day, is_meant)
        where g.nth = 1 and p.is_meant and coalesce(g.message_id <> all (v_known), true)
        order by g.message_id, p.day
        on conflict do nothing
        returning message_id
    ), new as (
        select w.message_id, count(*) as places from written w group by w.message_id
    )
    select coalesce(array_agg(g.nth = 1 and coalesce(n.places, 0) =
        case when g.day = any (v_misdated) and g.day <> all (v_only) then 2 else 1 end order by g.turn), '{}')
    into v_new
    from given g
    left join new n on n.message_id = g.message_id;
    return v_new;
end
$$;

CREATE FUNCTION corelane.remove_subscription(p_name text) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    delete from wh_subscription s where s.name = p_name;
    return found;
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

CREATE FUNCTION corelane.renew_outbox_messages(p_instance_id uuid, p_message_ids uuid[] DEFAULT NULL::uuid[], p_lease_seconds integer DEFAULT 30, OUT lease_lost boolean, OUT renewed integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_incarnation int4;
begin
    perform wh_require('length of p_message_ids', coalesce(cardinality(p_message_ids), 0), 0, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    update wh_handed_out h set handed_at = clock_timestamp()
    where h.incarnation = v_incarnation and not h.decided
        and (p_message_ids is null or h.message_id = any (p_message_ids));
    get diagnostics renewed = row_count;
end
$$;

CREATE FUNCTION corelane.replay_events(p_destination text, p_replay uuid DEFAULT NULL::uuid, p_all boolean DEFAULT false, p_streams uuid[] DEFAULT NULL::uuid[], p_version_from bigint DEFAULT NULL::bigint, p_version_to bigint DEFAULT NULL::bigint, p_position_from bigint DEFAULT NULL::bigint, p_position_to bigint DEFAULT NULL::bigint, p_type text DEFAULT NULL::text, p_stored_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_stored_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT replay_id uuid, OUT matched integer, OUT replayed integer, OUT waiting integer, OUT dead integer, OUT lanes integer, OUT last_position bigint, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_custom_plan'
    AS $$
#variable_conflict use_column
declare
    v_id constant uuid := coalesce(p_replay, gen_random_uuid());
    v_filter constant jsonb := jsonb_strip_nulls(jsonb_build_object('all', nullif(p_all, false), 'streams', p_streams,
        'version_from', p_version_from, 'version_to', p_version_to, 'position_from', p_position_from,
        'position_to', p_position_to, 'type', p_type, 'stored_from', p_stored_from, 'stored_before', p_stored_before));
    v_replay record;
    v_events record;
    v_rebased int8;
    v_unsettled int4[] := '{}';
    v_streams uuid[];
    v_versions int8[];
    v_lanes uuid[];
    v_partitions int4[];
    v_lane_count int4;
    v_told uuid[];
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    if coalesce(octet_length(p_destination), 0) not between 1 and 255 then
        raise exception 'a replay needs a destination of 1 to 255 bytes' using errcode = '22023';
    end if;
    if not p_dry_run then
        if exists (select from wh_instance i where i.state = 0 and i.owns is null) then
            raise exception 'a program of schema version 1 works here and does not know replays: update it first'
                using errcode = '55000';
        end if;
        -- Calls of one replay take turns from here on.
        insert into wh_replay as r (replay_id, destination, filter) values (v_id, p_destination, v_filter)
        on conflict (replay_id) do update set updated_at = clock_timestamp();
    end if;
    select r.destination, r.filter, r.replayed_to, r.events into v_replay from wh_replay r where r.replay_id = v_id;
    if v_replay.destination <> p_destination or v_replay.filter <> v_filter then
        raise exception 'replay % is one to % of %: go on with what it began with, or begin another one', v_id,
            v_replay.destination, v_replay.filter using errcode = '22023';
    end if;

    select m.* into v_events from wh_match_events(p_all, p_streams, p_version_from, p_version_to, p_position_from,
        p_position_to, p_type, p_stored_from, p_stored_before,
        greatest(coalesce(p_after, 0), coalesce(v_replay.replayed_to, 0)), p_rows_max) m;
    matched := cardinality(v_events.versions);
    replayed := 0;
    more := v_events.more;
    last_position := v_events.last_position;

    -- What was stored before a rebase bears another server's transaction id: the log says what of it is not published.
    select i.rebased_position into strict v_rebased from wh_installation i;
    if v_rebased > 0 then
        v_unsettled := array(
            select distinct p.partition
            from wh_log l
            cross join lateral (select distinct unnest(l.partition) as partition) p
            join wh_resolved r on r.partition = p.partition
            where l.position <= v_rebased and not pg_visible_in_snapshot(l.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(l.xid::text::xid8, r.cursor));
    end if;
    -- A first copy never comes from here: it would overtake those before it.
    with event as (
        select e.stream_id, e.version, e.stream_seq, e.partition, e.xid, e.position, m.turn
        from unnest(v_events.stream_ids, v_events.versions) with ordinality m(stream_id, version, turn)
        join wh_event_store e on e.stream_id = m.stream_id and e.version = m.version
    ), resolved as materialized (
        select r.partition, r.base, r.cursor from wh_resolved r where r.partition in (select e.partition from event e)
    ), judged as (
        select e.*,
            case when e.position <= v_rebased then e.partition = any (v_unsettled)
                else not (pg_visible_in_snapshot(e.xid::text::xid8, r.base)
                    or pg_visible_in_snapshot(e.xid::text::xid8, r.cursor)) end
            or exists (
                select from wh_parked_reference k
                where k.lane_id = e.stream_id and k.destination = p_destination and k.stream_seq = e.stream_seq)
                as is_waiting,
            exists (
                select from wh_dead_letter d
                where d.lane_id = e.stream_id and d.destination = p_destination and d.stream_seq = e.stream_seq)
                as is_dead
        from event e
        join resolved r on r.partition = e.partition
    )
    select count(*) filter (where j.is_waiting), count(*) filter (where j.is_dead and not j.is_waiting),
        coalesce(array_agg(j.stream_id order by j.turn) filter (where not j.is_waiting and not j.is_dead), '{}'),
        coalesce(array_agg(j.version order by j.turn) filter (where not j.is_waiting and not j.is_dead), '{}'),
        count(distinct j.stream_id) filter (where not j.is_waiting and not j.is_dead)
    into waiting, dead, v_streams, v_versions, lanes
    from judged j;
    if p_dry_run then
        return;
    end if;

    if v_replay.events = 0 and cardinality(v_versions) = 0 and not more then
        delete from wh_replay r where r.replay_id = v_id;
        return;
    end if;
    replay_id := v_id;
    update wh_replay r
    set replayed_to = last_position, events = r.events + cardinality(v_versions), updated_at = clock_timestamp()
    where r.replay_id = v_id;
    delete from wh_replay r where r.updated_at < clock_timestamp() - interval '30 days';
    if cardinality(v_versions) = 0 then
        return;
    end if;

    select array_agg(md5(v_id::text || l.stream_id::text)::uuid order by l.stream_id),
        array_agg(l.partition order by l.stream_id)
    into v_lanes, v_partitions
    from (
        select e.stream_id, min(e.partition) as partition
        from unnest(v_streams, v_versions) m(stream_id, version)
        join wh_event_store e on e.stream_id = m.stream_id and e.version = m.version
        group by e.stream_id
    ) l;
    v_lane_count := cardinality(v_lanes);
    perform wh_lock_owners(array(select distinct p from unnest(v_partitions) p));

    -- Later statements than the locks.
    insert into wh_parked as k (stream_seq, due, lane_id, partition, attempts, reason, destination)
    select min(e.stream_seq), clock_timestamp(), md5(v_id::text || e.stream_id::text)::uuid, min(e.partition), 0, 0,
        p_destination
    from unnest(v_streams, v_versions) m(stream_id, version)
    join wh_event_store e on e.stream_id = m.stream_id and e.version = m.version
    group by e.stream_id
    order by 3
    on conflict (lane_id, destination) do update set due = excluded.due, attempts = 0 where not k.held;
    insert into wh_parked_reference (stream_seq, version, position, span_id, stored_at, lane_id, stream_id, message_id,
        correlation_id, causation_id, trace_id, partition, trace_flags, destination, type_name, content_type, metadata,
        payload, retried)
    select e.stream_seq, e.version, e.position, e.span_id, e.stored_at, md5(v_id::text || e.stream_id::text)::uuid,
        e.stream_id, e.message_id, e.correlation_id, e.causation_id, e.trace_id, e.partition, e.trace_flags,
        p_destination, e.type_name, e.content_type, e.metadata, e.payload, 1
    from unnest(v_streams, v_versions) m(stream_id, version)
    join wh_event_store e on e.stream_id = m.stream_id and e.version = m.version
    on conflict (lane_id, destination, stream_seq) do nothing;
    get diagnostics replayed = row_count;
    for turn in 0..(v_lane_count - 1) / 4096 loop
        v_told := v_lanes[turn * 4096 + 1 : (turn + 1) * 4096];
        perform wh_tell_lanes(v_told, array_fill(p_destination, array[cardinality(v_told)]),
            v_partitions[turn * 4096 + 1 : (turn + 1) * 4096], array_fill(0::int8, array[cardinality(v_told)]));
    end loop;
end
$$;

CREATE FUNCTION corelane.retry_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_destination text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT matched integer, OUT retried integer, OUT not_stored integer, OUT lanes integer, OUT released integer, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_ids int8[];
    v_good int8[];
    v_lanes uuid[];
    v_destinations text[];
    v_partitions int4[];
    v_numbers int8[];
begin
    retried := 0;
    select t.ids, t.more into v_ids, more from wh_take_dead_letters(p_all, p_ids, p_destination, p_type, p_reason,
        p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;

    -- Later statements than the locks: another operator may have been here.
    select count(*), coalesce(array_agg(d.dead_letter_id) filter (where case
            when d.version = 0 or d.payload is not null then d.payload is not null else exists (
                select from wh_event_store e where e.stream_id = d.lane_id and e.version = d.version) end), '{}')
    into matched, v_good
    from wh_dead_letter d where d.dead_letter_id = any (v_ids);
    not_stored := matched - cardinality(v_good);

    select coalesce(array_agg(l.lane_id order by l.lane_id, l.destination), '{}'),
        array_agg(l.destination order by l.lane_id, l.destination),
        array_agg(l.partition order by l.lane_id, l.destination),
        coalesce(array_agg(l.number order by l.lane_id, l.destination), '{}')
    into v_lanes, v_destinations, v_partitions, v_numbers
    from (
        select d.lane_id, d.destination, min(d.partition) as partition,
            case when bool_or(k.held and k.stream_seq = d.stream_seq) then -1 else 0 end as number
        from wh_dead_letter d
        left join wh_parked k on k.lane_id = d.lane_id and k.destination = d.destination
        where d.dead_letter_id = any (v_good)
        group by d.lane_id, d.destination
    ) l;
    lanes := cardinality(v_lanes);
    released := (select count(*) from unnest(v_numbers) n where n = -1);
    if p_dry_run or lanes = 0 then
        return;
    end if;

    insert into wh_parked as k (stream_seq, due, lane_id, partition, attempts, reason, destination)
    select min(d.stream_seq), clock_timestamp(), d.lane_id, min(d.partition), 0, 0, d.destination
    from wh_dead_letter d
    where d.dead_letter_id = any (v_good)
    group by d.lane_id, d.destination
    order by d.lane_id, d.destination
    on conflict (lane_id, destination) do update
    set due = excluded.due, held = false, stream_seq = least(k.stream_seq, excluded.stream_seq),
        -- Of a head that waits before all of these: its own.
        attempts = case
            when k.stream_seq < excluded.stream_seq and exists (
                select from wh_parked_reference r
                where r.lane_id = k.lane_id and r.destination = k.destination and r.stream_seq = k.stream_seq)
                then k.attempts
            else 0
        end
    where not k.held or exists (
        select from wh_dead_letter d
        where d.dead_letter_id = any (v_good) and d.lane_id = k.lane_id and d.destination = k.destination
            and d.stream_seq = k.stream_seq);
    with given_back as (
        delete from wh_dead_letter d where d.dead_letter_id = any (v_good) returning d.*
    )
    insert into wh_parked_reference (stream_seq, version, position, span_id, stored_at, lane_id, stream_id, message_id,
        correlation_id, causation_id, trace_id, partition, trace_flags, destination, type_name, content_type, metadata,
        payload, retried)
    select d.stream_seq, d.version, d.position, d.span_id, d.stored_at, d.lane_id, d.stream_id, d.message_id,
        d.correlation_id, d.causation_id, d.trace_id, d.partition, d.trace_flags, d.destination, d.type_name,
        d.content_type, d.metadata, d.payload, d.retried + 1
    from given_back d
    on conflict (lane_id, destination, stream_seq) do update set retried = excluded.retried;
    retried := cardinality(v_good);
    perform wh_tell_lanes(v_lanes, v_destinations, v_partitions, v_numbers);
end
$$;

CREATE FUNCTION corelane.retry_inbox_dead_letters(p_all boolean DEFAULT false, p_ids bigint[] DEFAULT NULL::bigint[], p_consumer text DEFAULT NULL::text, p_source text DEFAULT NULL::text, p_type text DEFAULT NULL::text, p_reason smallint DEFAULT NULL::smallint, p_fingerprint text DEFAULT NULL::text, p_stream uuid DEFAULT NULL::uuid, p_dead_from timestamp with time zone DEFAULT NULL::timestamp with time zone, p_dead_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_after bigint DEFAULT 0, p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT matched integer, OUT retried integer, OUT lanes integer, OUT released integer, OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_ids int8[];
begin
    retried := 0;
    select t.ids, t.more into v_ids, more from wh_take_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type,
        p_reason, p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;
    -- A later statement than the lock: another operator may have been here.
    select count(*), count(distinct (d.consumer, d.lane_id)),
        count(distinct (d.consumer, d.lane_id)) filter (where k.held and k.message_id = d.message_id)
    into matched, lanes, released
    from wh_inbox_dead_letter d
    left join wh_inbox_parked k on k.consumer = d.consumer and k.lane_id = d.lane_id
    where d.dead_letter_id = any (v_ids);
    if p_dry_run or matched = 0 then
        return;
    end if;

    -- Before the bodies: whoever frees a lane waits for this, and then sees them (unpark_inbox).
    insert into wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
    select distinct on (d.consumer, d.lane_id) clock_timestamp(), d.lane_id, d.message_id,
        compute_partition(d.lane_id, (select i.partition_count from wh_installation i)), 0, d.consumer, 0
    from wh_inbox_dead_letter d
    where d.dead_letter_id = any (v_ids)
    order by d.consumer, d.lane_id, d.arrival
    on conflict (consumer, lane_id) do update
    -- Not out of the hands of a worker that has leased it (process_inbox_batch).
    set due = case when k.leased_to is not null and not k.held then greatest(k.due, excluded.due) else excluded.due end,
        message_id = excluded.message_id, attempts = 0, reason = 0, held = false
    where not k.held or exists (
        select from wh_inbox_dead_letter d
        where d.dead_letter_id = any (v_ids) and d.consumer = k.consumer and d.message_id = k.message_id);
    with given_back as (
        delete from wh_inbox_dead_letter d where d.dead_letter_id = any (v_ids) returning d.*
    ), kept as (
        insert into wh_inbox (arrival, span_id, received_at, lane_id, stream_id, message_id, correlation_id, causation_id,
            trace_id, retried, consumer, trace_flags, source, type_name, content_type, metadata, payload)
        overriding system value
        select d.arrival, d.span_id, d.received_at, d.lane_id, d.stream_id, d.message_id, d.correlation_id,
            d.causation_id, d.trace_id, d.retried + 1, d.consumer, d.trace_flags, d.source, d.type_name, d.content_type,
            d.metadata, d.payload
        from given_back d
        returning 1
    )
    select count(*) into retried from kept;
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
                -- Buried before the last cursor, and read again since: an operator decides about it.
                and not exists (
                    select from "corelane".wh_dead_letter d
                    where d.lane_id = s.lane_id and d.destination = s.destination and d.stream_seq = s.stream_seq)
            order by s.lane_id, s.destination, s.stream_seq, o.lane_id <> s.lane_id
            on conflict do nothing;
        end if;

        if cardinality(p_park_lane) > 0 then
            insert into "corelane".wh_parked as k (stream_seq, due, lane_id, partition, attempts, reason, error_cut, held,
                destination, error)
            select distinct on (n.lane_id, n.destination) n.stream_seq,
                clock_timestamp() + n.due_in_ms * interval '1 millisecond', n.lane_id, n.partition, n.attempts,
                n.reason, n.error_cut, n.due_in_ms >= 3155760000000, n.destination, n.error
            from unnest(p_park_lane, p_park_destination, p_park_partition, p_park_seq, p_park_attempts, p_park_reason,
                p_park_error, p_park_error_cut, p_park_due_in_ms) with ordinality
                n(lane_id, destination, partition, stream_seq, attempts, reason, error, error_cut, due_in_ms, turn)
            order by n.lane_id, n.destination, n.turn desc
            on conflict (lane_id, destination) do update
            set stream_seq = excluded.stream_seq, due = excluded.due, partition = excluded.partition,
                attempts = excluded.attempts, reason = excluded.reason, error_cut = excluded.error_cut,
                held = excluded.held, error = excluded.error;
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
                reason, error_cut, destination, error, error_fingerprint, type_name, content_type, metadata, payload,
                retried)
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
                coalesce(o.metadata, k.metadata), coalesce(o.payload, k.payload),
                coalesce(k.retried, 0)
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
                on k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq
            order by d.lane_id, d.destination, d.stream_seq, d.turn, o.lane_id <> d.lane_id
            on conflict (lane_id, destination, stream_seq) do nothing;
            delete from "corelane".wh_parked_reference k
            using unnest(p_dead_lane, p_dead_destination, p_dead_seq) d(lane_id, destination, stream_seq)
            where k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq;
        end if;

        if cardinality(p_unpark_lane) > 0 then
            -- Whoever puts something beside the log for a lane writes its row: it is waited for, and found by the
            -- statement after this one.
            perform
            from "corelane".wh_parked k
            join unnest(p_unpark_lane, p_unpark_destination) u(lane_id, destination)
                on k.lane_id = u.lane_id and k.destination = u.destination
            order by k.lane_id, k.destination
            for update of k;
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

CREATE FUNCTION corelane.share_subscription(p_subscription integer, p_incarnation integer, p_lease_ms bigint) RETURNS TABLE(epoch uuid, alive boolean, partition integer, fence bigint, resolved text, floor bigint, target text, target_floor bigint, "position" bigint, before boolean, give_up boolean)
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
    v_gone int4[];
    v_partitions int4;
    v_share int4;
    v_held int4;
    v_rebased int8;
begin
    alive := false;
    epoch := wh_epoch_token();
    perform from wh_subscription s where s.subscription = p_subscription for no key update;
    if found then
        alive := renew_lease(p_incarnation, p_lease_ms)
            and exists (select from wh_subscription_member m
                where m.subscription = p_subscription and m.incarnation = p_incarnation);
    end if;
    return next;
    if not alive then
        return;
    end if;

    select array_agg(m.incarnation) into v_gone
    from wh_subscription_member m
    left join wh_instance i on i.number = m.incarnation and i.state = 0
    where m.subscription = p_subscription and m.incarnation <> p_incarnation
        and (i.number is null or i.lease_until < clock_timestamp()
            or i.direct and pg_try_advisory_xact_lock(wh_lock_class(4), m.incarnation));
    if v_gone is not null then
        delete from wh_subscription_member m where m.subscription = p_subscription and m.incarnation = any (v_gone);
        -- Nobody else looks after one that owns nothing.
        update wh_instance i set state = 1 where i.number = any (v_gone) and i.state = 0 and i.owns is false;
    end if;

    select i.rebased_position, (select count(*) from wh_partition) into strict v_rebased, v_partitions
    from wh_installation i;
    select s.share, s.held into strict v_share, v_held
    from (
        select m.incarnation, m.held, v_partitions / (count(*) over ())::int4
            + case when row_number() over (order by m.held desc, m.incarnation)
                <= v_partitions % (count(*) over ())::int4 then 1 else 0 end as share
        from (
            select m.incarnation, (select count(*)::int4 from wh_subscription_partition p
                where p.subscription = p_subscription and p.owner = m.incarnation) as held
            from wh_subscription_member m where m.subscription = p_subscription
        ) m
    ) s
    where s.incarnation = p_incarnation;
    if v_held < v_share then
        update wh_subscription_partition p set owner = p_incarnation, fence = p.fence + 1, updated_at = clock_timestamp()
        from (
            select f.partition from wh_subscription_partition f
            where f.subscription = p_subscription
                and not exists (select from wh_subscription_member m
                    where m.subscription = p_subscription and m.incarnation = f.owner)
            order by f.partition
            limit v_share - v_held
            for no key update skip locked
        ) f
        where p.subscription = p_subscription and p.partition = f.partition;
        if found then
            perform pg_notify(wh_subscription_channel(), p_subscription::text);
        end if;
    end if;

    return query
    select null::uuid, null::bool, p.partition, p.fence, p.resolved::text, p.floor, p.target::text, p.target_floor, p.position,
        p.before_from < v_rebased, row_number() over (order by p.partition) > v_share
    from wh_subscription_partition p
    where p.subscription = p_subscription and p.owner = p_incarnation
    order by p.partition;
end
$$;

CREATE FUNCTION corelane.show_dead_letter(p_dead_letter_id bigint) RETURNS TABLE(dead_letter_id bigint, dead_at timestamp with time zone, destination text, partition integer, lane_id uuid, stream_id uuid, stream_seq bigint, version bigint, "position" bigint, stored_at timestamp with time zone, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, type_name text, content_type text, attempts integer, retried integer, reason smallint, error text, error_cut boolean, error_fingerprint text, metadata bytea, payload bytea)
    LANGUAGE sql STABLE
    AS $$
    select d.dead_letter_id, d.dead_at, d.destination, d.partition, d.lane_id, d.stream_id, d.stream_seq, d.version,
        d.position, d.stored_at, d.message_id, d.correlation_id, d.causation_id, d.trace_id, d.span_id, d.trace_flags,
        d.type_name, coalesce(d.content_type, 'application/json'), d.attempts, d.retried, d.reason, d.error,
        d.error_cut, d.error_fingerprint, coalesce(e.metadata, d.metadata), coalesce(e.payload, d.payload)
    from "corelane".wh_dead_letter d
    left join "corelane".wh_event_store e
        on e.stream_id = d.lane_id and e.version = nullif(d.version, 0)
    where d.dead_letter_id = p_dead_letter_id
$$;

CREATE FUNCTION corelane.show_inbox_dead_letter(p_dead_letter_id bigint) RETURNS TABLE(dead_letter_id bigint, dead_at timestamp with time zone, consumer text, source text, lane_id uuid, stream_id uuid, message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, received_at timestamp with time zone, type_name text, content_type text, attempts integer, retried integer, reason smallint, error text, error_cut boolean, error_fingerprint text, metadata bytea, payload bytea)
    LANGUAGE sql STABLE
    AS $$
    select d.dead_letter_id, d.dead_at, c.name, d.source, d.lane_id, d.stream_id, d.message_id, d.correlation_id,
        d.causation_id, d.trace_id, d.span_id, d.trace_flags, d.received_at, d.type_name,
        coalesce(d.content_type, 'application/json'), d.attempts, d.retried, d.reason, d.error, d.error_cut,
        d.error_fingerprint, d.metadata, d.payload
    from "corelane".wh_inbox_dead_letter d
    join "corelane".wh_consumer c on c.consumer = d.consumer
    where d.dead_letter_id = p_dead_letter_id
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
    v_conflict_version int8[];
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
                where coalesce(r.kind, 1) in (0, 1, 9) and r.partition = any (v_contested)
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
                min(r.version) filter (where r.version > 0) - 1 as assumed_version,
                coalesce(bool_or(r.kind = 9), false) as is_expected
            from r where coalesce(r.kind, 1) in (0, 1, 9) group by r.lane_id
        ),
        n as materialized (
            select s.id, s.turn, s.assumed_seq, s.assumed_version, coalesce(e.version, 0) as version,
                s.is_expected and coalesce(e.version, 0) <> s.assumed_version as is_conflict,
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
            from r left join n on n.id = r.lane_id and coalesce(r.kind, 1) in (0, 1, 9)
        )
        select coalesce(found.seq, '{}'), coalesce(found.version, '{}'), rows.seq, rows.version, found.conflict,
            found.conflict_version
        into last_seq, last_version, p_stream_seq, p_version, busy, v_conflict_version
        from (
            select array_agg(n.seq order by n.turn) as seq, array_agg(n.version order by n.turn) as version,
                array_agg(n.id order by n.turn) filter (where n.is_conflict) as conflict,
                array_agg(n.version order by n.turn) filter (where n.is_conflict) as conflict_version
            from n
        ) found, (
            select array_agg(d.seq order by d.turn) as seq, array_agg(d.version order by d.turn) as version
            from numbered d
        ) rows;
        if busy is not null then
            last_seq := null;
            last_version := v_conflict_version;
            return;
        end if;
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
        where coalesce(r.kind, 1) in (1, 9);
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
        where r.kind in (4, 6);
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

CREATE FUNCTION corelane.summarize_events() RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    lock table wh_event_store in share update exclusive mode nowait;
    return brin_summarize_new_values('wh_event_store_position') + brin_summarize_new_values('wh_event_store_xid');
exception
    when lock_not_available then
        return 0;
end
$$;

CREATE FUNCTION corelane.summarize_events_from(p_from bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_end int8 := (pg_relation_size('wh_event_store') / current_setting('block_size')::int8 - 8) / 32 * 32;
    v_at int8 := least(coalesce(p_from, 0), v_end) / 32 * 32;
begin
    if v_at >= v_end then
        return p_from;
    end if;
    lock table wh_event_store in share update exclusive mode nowait;
    if p_from is null then
        perform brin_summarize_new_values('wh_event_store_position'), brin_summarize_new_values('wh_event_store_xid');
        return v_end;
    end if;
    v_end := least(v_end, v_at + 32 * 256);
    while v_at < v_end loop
        perform brin_summarize_range('wh_event_store_position', v_at), brin_summarize_range('wh_event_store_xid', v_at);
        v_at := v_at + 32;
    end loop;
    return v_end;
exception
    when lock_not_available then
        return p_from;
end
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

CREATE FUNCTION corelane.test_listener(p_word bigint) RETURNS void
    LANGUAGE sql
    AS $$
    select pg_notify("corelane".wh_channel() || '_' || pg_backend_pid(), 'self:' || p_word)
$$;

CREATE FUNCTION corelane.truncate_stream(p_stream_id uuid, p_before bigint, p_note text DEFAULT NULL::text, p_rows_max integer DEFAULT 1000, p_dry_run boolean DEFAULT true, OUT first_version bigint, OUT matched bigint, OUT truncated bigint, OUT waiting bigint, OUT dead bigint, OUT more boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
declare
    v_last record;
    v_first int8;
    v_to int8;
    v_stop int8;
    v_rebased int8;
    v_is_unsettled bool := false;
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    perform wh_require('bytes of p_note', octet_length(coalesce(p_note, '')), 0, 1024);
    if not p_dry_run then
        perform pg_advisory_xact_lock(wh_lock_class(6), 4);
    end if;

    -- Later statements than the lock.
    select e.version, e.partition into v_last
    from wh_event_store e where e.stream_id = p_stream_id order by e.version desc limit 1;
    if p_before is null or p_before > coalesce(v_last.version, 0) then
        raise exception 'p_before = %: stream % is at version %, and its newest event stays', p_before, p_stream_id,
            coalesce(v_last.version, 0) using errcode = '22023', hint = 'erase_events empties it.';
    end if;
    v_first := coalesce((select t.first_version from wh_tombstone t where t.stream_id = p_stream_id), 1);
    v_to := case when p_dry_run then p_before else least(p_before, v_first + p_rows_max) end;

    -- As replay_events: ids of what was stored before a rebase mean nothing, the log says what of it is not published.
    select i.rebased_position into strict v_rebased from wh_installation i;
    if v_rebased > 0 then
        v_is_unsettled := exists (
            select from wh_log l
            join wh_resolved r on r.partition = v_last.partition
            where l.position <= v_rebased and v_last.partition = any (l.partition)
                and not pg_visible_in_snapshot(l.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(l.xid::text::xid8, r.cursor));
    end if;
    with resolved as materialized (
        select r.base, r.cursor from wh_resolved r where r.partition = v_last.partition
    ), judged as (
        select e.version,
            case when e.position <= v_rebased then v_is_unsettled
                else not (pg_visible_in_snapshot(e.xid::text::xid8, r.base)
                    or pg_visible_in_snapshot(e.xid::text::xid8, r.cursor)) end
            or e.stream_seq in (
                select k.stream_seq from wh_parked_reference k where k.lane_id = p_stream_id and k.version > 0)
                as is_waiting,
            e.stream_seq in (
                select d.stream_seq from wh_dead_letter d where d.lane_id = p_stream_id and d.version > 0) as is_dead
        from wh_event_store e
        cross join resolved r
        where e.stream_id = p_stream_id and e.version >= v_first and e.version < v_to
    )
    select count(*), count(*) filter (where j.is_waiting), count(*) filter (where j.is_dead),
        coalesce(min(j.version) filter (where j.is_waiting or j.is_dead), greatest(v_to, v_first))
    into matched, waiting, dead, v_stop
    from judged j;
    first_version := v_stop;
    truncated := 0;
    more := not p_dry_run and v_stop > v_first and v_stop = v_to and v_to < p_before;
    if p_dry_run or v_stop <= v_first then
        return;
    end if;

    delete from wh_event_store e where e.stream_id = p_stream_id and e.version < v_stop;
    get diagnostics truncated = row_count;
    insert into wh_tombstone as t (first_version, events, stream_id, note)
    values (v_stop, truncated, p_stream_id, coalesce(p_note, ''))
    on conflict (stream_id) do update
    set first_version = excluded.first_version, events = t.events + excluded.events,
        truncated_at = excluded.truncated_at, note = coalesce(p_note, t.note);
end
$$;

CREATE FUNCTION corelane.unpark_inbox(p_consumer smallint, p_lane_ids uuid[]) RETURNS boolean[]
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    perform from wh_inbox_parked k
    where k.consumer = p_consumer and k.lane_id = any (p_lane_ids)
    order by k.lane_id
    for update;
    delete from wh_inbox_parked k
    where k.consumer = p_consumer and k.lane_id = any (p_lane_ids) and not k.held
        and not exists (select from wh_inbox i where i.consumer = k.consumer and i.lane_id = k.lane_id);
    update wh_inbox_parked k
    set due = clock_timestamp(), attempts = 0, reason = 0, error = '', error_cut = false, leased_to = null,
        leased_through = null, leased_rows = null
    where k.consumer = p_consumer and k.lane_id = any (p_lane_ids) and not k.held;
    return coalesce((
        select array_agg(not exists (
            select from wh_inbox_parked k where k.consumer = p_consumer and k.lane_id = l.lane_id) order by l.turn)
        from unnest(p_lane_ids) with ordinality l(lane_id, turn)), '{}');
end
$$;

CREATE FUNCTION corelane.wait_for_end(p_incarnation integer) RETURNS boolean
    LANGUAGE sql
    AS $$
    select case
        when coalesce((select i.direct from "corelane".wh_instance i where i.number = p_incarnation), true)
        then pg_advisory_xact_lock_shared("corelane".wh_lock_class(4), p_incarnation) is not null
    end
$$;

CREATE FUNCTION corelane.wh_begin_work(p_instance_id uuid, p_service_name text, p_instance_name text, p_lease_ms bigint, p_owns boolean) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_number int4;
    v_service_name text;
    v_begins bool;
    v_instance wh_instance;
begin
    if p_instance_id is null then
        raise exception 'the instance id is null: give the worker a uuid of its own each time it starts'
            using errcode = '22023';
    end if;
    perform wh_require('p_lease_seconds', p_lease_ms / 1000, 1, 3600);
    select i.number, i.service_name, p_owns and i.owns is null and not i.direct into v_number, v_service_name, v_begins
    from wh_instance i where i.id = p_instance_id;
    if not found then
        if p_service_name is null then
            raise exception 'instance % is not known: process_work_batch or heartbeat register it, with its service''s name',
                p_instance_id using errcode = '22023';
        end if;
        begin
            select r.number into v_number
            from register_instance(p_instance_id, p_service_name, p_instance_name, p_lease_ms, 1, p_owns, false) r;
        exception when unique_violation then
            -- Two first calls at once.
            select i.number, i.service_name, p_owns and i.owns is null and not i.direct
            into strict v_number, v_service_name, v_begins
            from wh_instance i where i.id = p_instance_id;
        end;
    end if;
    if v_begins then
        perform wh_enter_service(v_service_name);
    end if;
    perform pg_advisory_xact_lock(wh_lock_class(3), v_number);

    -- Later statements than the lock.
    update wh_instance i
    set counter = i.counter + 1, lease_until = clock_timestamp() + p_lease_ms * interval '1 millisecond',
        owns = case when v_begins then coalesce(i.owns, true) else i.owns end
    where i.number = v_number and i.state = 0 and i.lease_until > clock_timestamp()
    returning i.* into v_instance;
    if found then
        if v_instance.direct or v_instance.shards <> 1 then
            raise exception 'instance % is an engine''s: a worker needs an id of its own', p_instance_id
                using errcode = '22023';
        end if;
        if p_owns and not coalesce(v_instance.owns, false) then
            raise exception 'instance % was registered to store only', p_instance_id
                using errcode = '22023', hint = 'Claim under a new id.';
        end if;
        if v_begins then
            perform pg_notify(wh_channel(), 'members');
        end if;
        return v_number;
    end if;
    update wh_instance i set state = 1 where i.number = v_number and i.state = 0 and not i.direct;
    if found then
        perform wh_free_partitions(v_number);
        perform pg_notify(wh_channel(), 'members');
    end if;
    delete from wh_handed_out h where h.incarnation = v_number;
    return null;
end
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

CREATE FUNCTION corelane.wh_complete_work(p_incarnation integer, p_message_ids uuid[], p_destinations text[], p_statuses integer[], OUT completed integer, OUT returned integer, OUT unknown integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    AS $$
declare
    v_element int8;
    v_status int4;
    v_lane uuid[];
    v_destination text[];
    v_partition int4[];
    v_seq int8[];
    v_beside bool[];
    v_returned bool[];
begin
    completed := 0;
    returned := 0;
    unknown := 0;
    if coalesce(cardinality(p_message_ids), 0) = 0 then
        return;
    end if;
    if cardinality(p_destinations) <> cardinality(p_message_ids) or cardinality(p_statuses) <> cardinality(p_message_ids) then
        raise exception 'completions: % message ids, % destinations, % statuses', cardinality(p_message_ids),
            cardinality(p_destinations), cardinality(p_statuses) using errcode = '22023';
    end if;
    select s.element, s.status into v_element, v_status
    from unnest(p_statuses) with ordinality s(status, element)
    where s.status <> 0 and (s.status & 4 = 0 or s.status & 32768 <> 0)
    order by s.element limit 1;
    if found then
        raise exception 'completion % (message %): status % is no completion', v_element, p_message_ids[v_element], v_status
            using errcode = '22023', hint = 'Published (4) is, and 0 gives the message back.';
    end if;

    with named as materialized (
        select m.*, coalesce(p_statuses[m.turn::int4], 4) = 0 as returned
        from wh_match_in_hand(p_incarnation, p_message_ids, p_destinations) m
    ), hit as (
        select distinct on (n.lane_id, n.destination, n.stream_seq, n.beside) n.*
        from named n
        order by n.lane_id, n.destination, n.stream_seq, n.beside, n.returned, n.turn
    )
    select array_agg(h.lane_id), array_agg(h.destination), array_agg(h.partition), array_agg(h.stream_seq),
        array_agg(h.beside), array_agg(h.returned), count(*) filter (where not h.returned),
        count(*) filter (where h.returned),
        cardinality(p_message_ids) - (select count(distinct n.turn) from named n)
    into v_lane, v_destination, v_partition, v_seq, v_beside, v_returned, completed, returned, unknown
    from hit h;
    if v_lane is null then
        return;
    end if;

    update wh_handed_out h set decided = true
    from unnest(v_lane, v_destination, v_seq, v_beside, v_returned) d(lane_id, destination, stream_seq, beside, returned)
    where h.incarnation = p_incarnation and h.lane_id = d.lane_id and h.destination = d.destination
        and h.stream_seq = d.stream_seq and h.beside = d.beside and not d.beside and not d.returned;
    delete from wh_handed_out h
    using unnest(v_lane, v_destination, v_seq, v_beside, v_returned) d(lane_id, destination, stream_seq, beside, returned)
    where h.incarnation = p_incarnation and h.lane_id = d.lane_id and h.destination = d.destination
        and h.stream_seq = d.stream_seq and h.beside = d.beside and (d.beside or d.returned);
    select coalesce(array_agg(d.lane_id), '{}'), coalesce(array_agg(d.destination), '{}'),
        coalesce(array_agg(d.partition), '{}'), coalesce(array_agg(d.stream_seq), '{}')
    into v_lane, v_destination, v_partition, v_seq
    from unnest(v_lane, v_destination, v_partition, v_seq, v_beside, v_returned)
        d(lane_id, destination, partition, stream_seq, beside, returned)
    where d.beside and not d.returned;
    perform wh_settle_work(p_incarnation, p_drained_lane => v_lane, p_drained_destination => v_destination,
        p_drained_partition => v_partition, p_drained_seq => v_seq);
end
$$;

CREATE FUNCTION corelane.wh_cut_error(p_error text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    select case
        when p_error is null then ''
        when octet_length(convert_to(p_error, 'UTF8')) <= 8192 then p_error
        else (
            -- The byte behind the cut is not the continuation of a character.
            select convert_from(substring(e.bytes from 1 for k.size), 'UTF8')
            from (select convert_to(p_error, 'UTF8') as bytes) e, generate_series(8189, 8192) k(size)
            where get_byte(e.bytes, k.size) & 192 <> 128
            order by k.size desc limit 1)
    end
$$;

CREATE FUNCTION corelane.wh_decide_inbox(p_worker uuid, p_consumer smallint, p_completions uuid[], p_failures uuid[], p_reasons integer[], p_errors text[], p_renewals uuid[], p_lease interval, p_attempts_max integer, p_base_ms bigint, p_cap_ms bigint, p_hold boolean, OUT completed integer, OUT failed integer, OUT unknown integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
declare
    v_reported constant uuid[] := coalesce(p_completions, '{}') || coalesce(p_failures, '{}') || coalesce(p_renewals, '{}');
    v_locked uuid[];
    v_held uuid[];
    v_lanes uuid[];
    v_done_lanes uuid[];
    v_done_rows int4[];
    v_lost uuid;
    v_failure record;
begin
    completed := 0;
    failed := 0;
    unknown := 0;
    perform wh_require('p_attempts_max', p_attempts_max, 1, 1000000);
    perform wh_require('p_retry_base_ms', p_base_ms, 0, 86400000);
    perform wh_require('p_retry_cap_ms', p_cap_ms, 0, 86400000);
    if cardinality(p_reasons) <> cardinality(p_failures) or cardinality(p_errors) <> cardinality(p_failures) then
        raise exception 'failures: % message ids, % reasons, % errors', cardinality(p_failures), cardinality(p_reasons),
            cardinality(p_errors) using errcode = '22023';
    end if;
    if cardinality(v_reported) = 0 then
        return;
    end if;
    v_locked := array(
        select l.lane_id
        from (
            select distinct i.lane_id from wh_inbox i
            where i.consumer = p_consumer and i.message_id = any (v_reported) offset 0
        ) l
        where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, l.lane_id)));

    -- Later statements than the locks: another one may have handled a lane meanwhile.
    perform from wh_inbox_parked k
    where k.consumer = p_consumer and k.lane_id = any (v_locked)
    order by k.lane_id
    for update;
    select coalesce(array_agg(i.message_id), '{}'), coalesce(array_agg(distinct i.lane_id), '{}') into v_held, v_lanes
    from wh_inbox i
    join wh_inbox_parked k on k.consumer = i.consumer and k.lane_id = i.lane_id
    where i.consumer = p_consumer and i.message_id = any (v_reported) and i.lane_id = any (v_locked)
        and k.leased_to = p_worker and i.arrival <= k.leased_through;
    if exists (
        select from wh_inbox i
        join wh_inbox_parked k on k.consumer = i.consumer and k.lane_id = i.lane_id
        where i.consumer = p_consumer and i.message_id = any (v_reported) and not i.lane_id = any (v_locked)
            and k.leased_to = p_worker and i.arrival <= k.leased_through and k.due > clock_timestamp())
    then
        raise exception 'somebody stores in a stream of this worker''s at this moment' using errcode = '55P03',
            hint = 'Nothing is decided: run the transaction again.';
    end if;
    select c into v_lost from unnest(p_completions) c where c is null or not c = any (v_held) limit 1;
    if found then
        raise exception 'message % is not this worker''s any more', v_lost using errcode = 'CL040',
            detail = format('message_id=%s', v_lost),
            hint = 'Roll back: its lease is over, or it is decided. Somebody else has its effects, or will.';
    end if;
    unknown := (select count(*) from unnest(coalesce(p_failures, '{}') || coalesce(p_renewals, '{}')) r
        where r is null or not r = any (v_held));
    select array_agg(d.lane_id), array_agg(d.rows) into v_done_lanes, v_done_rows
    from (
        select i.lane_id, count(*)::int4 as rows from wh_inbox i
        where i.consumer = p_consumer and i.message_id = any (p_completions)
        group by i.lane_id
    ) d;
    completed := (select count(*) from unnest(finish_inbox(p_consumer, p_completions)) d where d);

    -- Of a lane only the first failure counts: what is behind it was handled too soon.
    with head as (
        select distinct on (i.lane_id) i.lane_id, i.message_id, f.error,
            (case when f.reason = any ('{0,1,2,3,4,5,6,7,8,12}') then f.reason else 99 end)::int2 as reason,
            case when k.message_id = i.message_id then k.attempts else 0 end as attempts
        from unnest(p_failures, p_reasons, p_errors) with ordinality f(message_id, reason, error, turn)
        join wh_inbox i on i.consumer = p_consumer and i.message_id = f.message_id
        join wh_inbox_parked k on k.consumer = p_consumer and k.lane_id = i.lane_id
        where i.message_id = any (v_held)
        order by i.lane_id, i.arrival, f.turn desc
    ), judged as (
        select h.lane_id, h.message_id, coalesce(h.error, '') as error, h.reason,
            h.attempts + (h.reason not in (1, 8))::int4 as attempts,
            h.reason in (3, 4, 12) or h.reason not in (1, 8) and h.attempts + 1 >= p_attempts_max as is_dead
        from head h
    )
    select count(*) as count, coalesce(array_agg(j.lane_id), '{}') as lanes,
        coalesce(array_agg(j.lane_id) filter (where j.is_dead), '{}') as dead_lanes,
        coalesce(array_agg(j.message_id) filter (where j.is_dead), '{}') as dead_ids,
        coalesce(array_agg(j.attempts) filter (where j.is_dead), '{}') as dead_attempts,
        coalesce(array_agg(j.reason) filter (where j.is_dead), '{}') as dead_reasons,
        coalesce(array_agg(j.error) filter (where j.is_dead), '{}') as dead_errors,
        array_agg(j.lane_id) filter (where not j.is_dead) as parked_lanes,
        array_agg(j.message_id) filter (where not j.is_dead) as ids,
        array_agg(j.attempts) filter (where not j.is_dead) as attempts,
        array_agg(j.reason) filter (where not j.is_dead) as reasons,
        array_agg(j.error) filter (where not j.is_dead) as errors,
        array_agg(case when j.reason in (1, 8) then p_base_ms / 30
            else (least(p_base_ms * 2.0 ^ least(j.attempts - 1, 40), p_cap_ms) * (0.9 + 0.2 * random()))::int8 end)
            filter (where not j.is_dead) as due_in_ms
    into v_failure
    from judged j;
    failed := v_failure.count;
    if failed > 0 then
        perform park_inbox(p_consumer, v_failure.parked_lanes, v_failure.ids, v_failure.attempts, v_failure.reasons,
            v_failure.errors, v_failure.due_in_ms);
        perform bury_inbox(p_consumer, v_failure.dead_ids, v_failure.dead_attempts, v_failure.dead_reasons,
            v_failure.dead_errors, p_hold);
    end if;

    -- A lane of which nothing is in hand any more goes on, with what an operator has given back meanwhile; the lease of
    -- the others begins anew.
    update wh_inbox_parked k
    set due = case when k.held then k.due else clock_timestamp() + p_lease end,
        leased_rows = k.leased_rows - coalesce(d.rows, 0)
    from unnest(v_lanes) l(lane_id)
    left join unnest(v_done_lanes, v_done_rows) d(lane_id, rows) on d.lane_id = l.lane_id
    where k.consumer = p_consumer and k.lane_id = l.lane_id and not l.lane_id = any (v_failure.lanes);
    v_lanes := array(
        select k.lane_id from wh_inbox_parked k
        where k.consumer = p_consumer and k.lane_id = any (v_lanes)
            and (k.lane_id = any (v_failure.lanes) or k.leased_rows <= 0 or not exists (
                select from wh_inbox i
                where i.consumer = p_consumer and i.lane_id = k.lane_id and i.arrival <= k.leased_through)));
    update wh_inbox_parked k set leased_to = null, leased_through = null, leased_rows = null
    where k.consumer = p_consumer and k.lane_id = any (v_lanes);
    perform unpark_inbox(p_consumer, array(
        select l from unnest(v_lanes) l where not l = any (v_failure.lanes)) || v_failure.dead_lanes);
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

CREATE FUNCTION corelane.wh_enter_service(p_service_name text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_other text;
begin
    perform pg_advisory_xact_lock(wh_lock_class(6), 1);
    select i.service_name into v_other
    from wh_instance i
    where i.state = 0 and i.service_name <> p_service_name and i.lease_until > clock_timestamp()
        and coalesce(i.owns, exists (select from wh_partition p where p.owner = i.number))
    order by i.number limit 1;
    if found then
        raise exception 'the partitions of this schema belong to the service %: service % cannot own any', v_other,
            p_service_name
            using errcode = 'CL008', hint = 'Give each service a schema of its own, or let this one only store.';
    end if;
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

CREATE FUNCTION corelane.wh_fail_work(p_incarnation integer, p_message_ids uuid[], p_destinations text[], p_reasons integer[], p_errors text[], p_dead boolean, p_attempts_max integer, p_base_ms bigint, p_cap_ms bigint, p_hold text[], OUT failed integer, OUT dead integer, OUT unknown integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    AS $$
declare
    v_lane uuid[];
    v_destination text[];
    v_partition int4[];
    v_seq int8[];
    v_version int8[];
    v_beside bool[];
    v_attempts int4[];
    v_counted bool[];
    v_reason int2[];
    v_error text[];
    v_is_cut bool[];
    v_is_dead bool[];
    v_holds bool[];
    v_is_held bool[];
    v_done record;
begin
    failed := 0;
    dead := 0;
    unknown := 0;
    perform wh_require('p_attempts_max', p_attempts_max, 1, 1000000);
    perform wh_require('p_retry_base_ms', p_base_ms, 0, 86400000);
    perform wh_require('p_retry_cap_ms', p_cap_ms, 0, 86400000);
    if coalesce(cardinality(p_message_ids), 0) = 0 then
        return;
    end if;
    if cardinality(p_destinations) <> cardinality(p_message_ids) or cardinality(p_reasons) <> cardinality(p_message_ids)
        or cardinality(p_errors) <> cardinality(p_message_ids)
    then
        raise exception 'failures: % message ids, % destinations, % reasons, % errors', cardinality(p_message_ids),
            cardinality(p_destinations), cardinality(p_reasons), cardinality(p_errors) using errcode = '22023';
    end if;

    with failure as (
        select wh_cut_error(f.error) as error, octet_length(convert_to(f.error, 'UTF8')) > 8192 as is_cut,
            (case when f.reason = any ('{0,1,2,3,4,5,6,7,8,12}') then f.reason else 99 end)::int2 as reason, f.turn
        from unnest(p_message_ids, p_reasons, p_errors) with ordinality f(message_id, reason, error, turn)
    ), named as materialized (
        select m.* from wh_match_in_hand(p_incarnation, p_message_ids, p_destinations) m
    ), hit as (
        select distinct on (h.lane_id, h.destination, h.stream_seq) h.*, f.reason, f.error,
            coalesce(f.is_cut, false) as is_cut, not p_dead and f.reason in (1, 8) as is_free,
            coalesce(k.attempts, 0) as attempts_before, w.lane_id is not null as is_held,
            -- A message without stream has a lane of its own.
            coalesce(h.destination = any (p_hold), false) and h.lane_id <> wh_lane(h.message_id) as holds
        from failure f
        join named h on h.turn = f.turn
        left join wh_parked k on k.lane_id = h.lane_id and k.destination = h.destination and k.stream_seq = h.stream_seq
        left join wh_parked w on w.lane_id = h.lane_id and w.destination = h.destination and w.held
        order by h.lane_id, h.destination, h.stream_seq, h.beside, f.turn desc
    ), judged as (
        select h.*, h.attempts_before + (not h.is_free)::int4 as attempts, (p_dead or h.reason in (3, 4, 12)
            or not h.is_free and h.attempts_before + 1 >= p_attempts_max)
            and (not h.holds or row_number() over (partition by h.lane_id, h.destination order by h.stream_seq) = 1)
            as is_dead
        from hit h
    )
    select array_agg(j.lane_id), array_agg(j.destination), array_agg(j.partition), array_agg(j.stream_seq),
        array_agg(j.version), array_agg(j.beside), array_agg(j.attempts), array_agg(not j.is_free),
        array_agg(j.reason), array_agg(j.error), array_agg(j.is_cut), array_agg(j.is_dead),
        array_agg(j.holds and j.is_dead), array_agg(j.is_held),
        count(*) filter (where not j.is_dead), count(*) filter (where j.is_dead),
        cardinality(p_message_ids) - (select count(distinct n.turn) from named n)
    into v_lane, v_destination, v_partition, v_seq, v_version, v_beside, v_attempts, v_counted, v_reason, v_error,
        v_is_cut, v_is_dead, v_holds, v_is_held, failed, dead, unknown
    from judged j;
    if v_lane is null then
        return;
    end if;

    -- The first of a lane parks it; what stands behind it in the log is kept beside, dead or withdrawn. A lane that is
    -- held stays so.
    with judged as (
        select * from unnest(v_lane, v_destination, v_partition, v_seq, v_version, v_attempts, v_counted, v_reason,
            v_error, v_is_cut, v_is_dead, v_holds, v_is_held)
            j(lane_id, destination, partition, stream_seq, version, attempts, counted, reason, error, is_cut, is_dead,
                holds, is_held)
    ), first as (
        select distinct on (j.lane_id, j.destination) j.*,
            case
                when j.holds then 3155760000000
                when not j.counted then p_base_ms / 30
                else (least(p_base_ms * 2.0 ^ least(j.attempts - 1, 40), p_cap_ms) * (0.9 + 0.2 * random()))::int8
            end as due_in_ms
        from judged j
        where not j.is_dead or j.holds
        order by j.lane_id, j.destination, j.stream_seq
    ), spill as (
        select h.lane_id, h.destination, h.partition, h.stream_seq, h.version
        from first k
        join wh_handed_out h on h.incarnation = p_incarnation and h.lane_id = k.lane_id
            and h.destination = k.destination and h.stream_seq >= k.stream_seq and not h.beside and not h.decided
        where not exists (
            select from judged j
            where j.is_dead and j.lane_id = h.lane_id and j.destination = h.destination and j.stream_seq = h.stream_seq)
    ), kept as (
        update wh_handed_out h set decided = true from spill s
        where h.incarnation = p_incarnation and h.lane_id = s.lane_id and h.destination = s.destination
            and h.stream_seq = s.stream_seq and not h.beside
    ), p as (
        select coalesce(array_agg(k.lane_id), '{}') as lane_id, coalesce(array_agg(k.destination), '{}') as destination,
            coalesce(array_agg(k.partition), '{}') as partition, coalesce(array_agg(k.stream_seq), '{}') as stream_seq,
            coalesce(array_agg(k.attempts), '{}') as attempts, coalesce(array_agg(k.reason), '{}') as reason,
            coalesce(array_agg(k.error), '{}') as error, coalesce(array_agg(k.is_cut), '{}') as is_cut,
            coalesce(array_agg(k.due_in_ms), '{}') as due_in_ms
        from first k
        where k.holds or not k.is_held
    ), s as (
        select coalesce(array_agg(s.lane_id), '{}') as lane_id, coalesce(array_agg(s.destination), '{}') as destination,
            coalesce(array_agg(s.partition), '{}') as partition, coalesce(array_agg(s.stream_seq), '{}') as stream_seq,
            coalesce(array_agg(s.version), '{}') as version
        from spill s
    ), d as (
        select coalesce(array_agg(j.lane_id), '{}') as lane_id, coalesce(array_agg(j.destination), '{}') as destination,
            coalesce(array_agg(j.partition), '{}') as partition, coalesce(array_agg(j.stream_seq), '{}') as stream_seq,
            coalesce(array_agg(j.version), '{}') as version, coalesce(array_agg(j.attempts), '{}') as attempts,
            coalesce(array_agg(j.reason), '{}') as reason, coalesce(array_agg(j.error), '{}') as error,
            coalesce(array_agg(j.is_cut), '{}') as is_cut
        from judged j where j.is_dead
    )
    select wh_settle_work(p_incarnation, p.lane_id, p.destination, p.partition, p.stream_seq, p.attempts, p.reason,
        p.error, p.is_cut, p.due_in_ms, s.lane_id, s.destination, s.partition, s.stream_seq, s.version,
        '{}', '{}', '{}', '{}', d.lane_id, d.destination, d.partition, d.stream_seq, d.version, d.attempts, d.reason,
        d.error, d.is_cut) as done
    into v_done
    from p, s, d;
    update wh_handed_out h set decided = true
    from unnest(v_lane, v_destination, v_seq, v_is_dead) j(lane_id, destination, stream_seq, is_dead)
    where h.incarnation = p_incarnation and h.lane_id = j.lane_id and h.destination = j.destination
        and h.stream_seq = j.stream_seq and not h.beside and j.is_dead;
    delete from wh_handed_out h
    using (
        select j.lane_id, j.destination, min(j.stream_seq) as stream_seq
        from unnest(v_lane, v_destination, v_seq) j(lane_id, destination, stream_seq)
        group by j.lane_id, j.destination
    ) f
    where h.incarnation = p_incarnation and h.lane_id = f.lane_id and h.destination = f.destination
        and h.stream_seq >= f.stream_seq and not h.decided;
end
$$;

CREATE FUNCTION corelane.wh_find_events(p_after bigint, p_low bigint, p_started bigint, p_ceiling bigint, p_window bigint, p_late bigint[], p_rows_max integer, OUT places tid[], OUT low bigint, OUT window_end bigint, OUT scanned bigint) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
    v_scan_max int8 := 8 * p_rows_max::int8;
    v_window tid[];
begin
    low := p_low;
    if p_late is not null and low > p_after then
        -- Those of about the same time in one scan.
        places := array(
            select e.ctid
            from (
                select min(x.xid) as first_xid, max(x.xid) as last_xid
                from (
                    select x.xid, count(*) filter (where x.is_far) over (order by x.xid) as island
                    from (
                        select x as xid, x - lag(x) over (order by x) > 100 as is_far from unnest(p_late) x
                    ) x
                ) x
                group by x.island
            ) x
            cross join lateral (
                select e.ctid
                from wh_event_store e
                where e.xid >= x.first_xid and e.xid <= x.last_xid and e.xid = any (p_late)
                    and e.position + 0 > p_after and e.position + 0 <= p_low
                limit v_scan_max + 1
            ) e
            limit v_scan_max + 1);
        if cardinality(places) > v_scan_max then
            -- A large one: walk by position from where it began.
            low := greatest(p_after, p_started);
            places := null;
        end if;
    end if;

    window_end := least(p_ceiling, low + coalesce(p_window, p_ceiling));
    scanned := 0;
    -- Nothing was drawn since: only what has come late is of interest.
    while window_end > low loop
        -- All of a window that is not made smaller: 4,096 positions have no more rows than that.
        v_window := array(
            select e.ctid from wh_event_store e where e.position > low and e.position <= window_end
            limit greatest(v_scan_max, 4096) + 1);
        scanned := cardinality(v_window);
        exit when scanned <= v_scan_max or window_end - low <= 4096;
        window_end := low + greatest((window_end - low) / 8, 4096);
    end loop;
    places := v_window || places;
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

CREATE FUNCTION corelane.wh_hand_out(p_incarnation integer, p_lease_ms bigint, p_streams_max integer, p_rows_max integer, p_stream_rows_max integer, OUT members integer, OUT handed_at timestamp with time zone) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
#variable_conflict use_column
declare
    v_now constant timestamptz := clock_timestamp();
    v_leaving int4[] := '{}';
    v_room int4;
    v_read record;
    v_taken int4[];
    v_message uuid[];
    v_due record;
    v_open int8[];
    v_unread int8;
    v_rest int8[];
    v_xmax int8;
    v_cut int8;
    v_cursor pg_snapshot;
    v_ownership int8;
    v_gone int4[];
    v_resolved pg_snapshot[];
begin
    handed_at := v_now;
    if p_streams_max > 0 then
        select s.leaving, s.members into v_leaving, members from wh_share_partitions(p_incarnation, p_lease_ms) s;
        -- What is due gets its numbers, and is handed out by a later call.
        perform release_scheduled(p_incarnation,
            array(select p.partition from wh_partition p where p.owner = p_incarnation), p_rows_max);
    end if;
    delete from wh_handed_out h
    where h.incarnation = p_incarnation
        and h.partition not in (select p.partition from wh_partition p where p.owner = p_incarnation);
    select case when p_streams_max > 0 then greatest(0, p_rows_max - count(*)) else 0 end into v_room
    from wh_handed_out h where h.incarnation = p_incarnation and not h.decided;

    select r.* into v_read from wh_read_undecided(p_incarnation, v_leaving, v_room, p_stream_rows_max) r;

    -- Of parked lanes: beside the log, where their next owner finds it as well.
    if 3 = any (v_read.state) then
        perform wh_settle_work(p_incarnation, p_spill_lane => array_agg(r.lane_id),
            p_spill_destination => array_agg(r.destination), p_spill_partition => array_agg(r.partition),
            p_spill_seq => array_agg(r.stream_seq), p_spill_version => array_agg(r.version))
        from unnest(v_read.lane, v_read.destination, v_read.partition, v_read.stream_seq, v_read.version, v_read.state)
            r(lane_id, destination, partition, stream_seq, version, state)
        where r.state = 3;
        insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, incarnation, partition, beside, decided,
            destination)
        select distinct on (r.lane_id, r.destination, r.stream_seq) r.xid, r.stream_seq, r.version, v_now, r.lane_id,
            p_incarnation, r.partition, false, true, r.destination
        from unnest(v_read.xid, v_read.lane, v_read.destination, v_read.partition, v_read.stream_seq, v_read.version,
            v_read.state) r(xid, lane_id, destination, partition, stream_seq, version, state)
        where r.state = 3
        on conflict do nothing;
    end if;

    if v_room > 0 then
        -- Whoever released a lane, or discarded what it waited for, has left its row: nothing may stand behind it. Not
        -- before all is read: its head may be in the log.
        if v_read.page_end is null then
            delete from wh_parked k
            where k.due <= v_now
                and k.partition in (select p.partition from wh_partition p where p.owner = p_incarnation)
                and not exists (
                    select from wh_parked_reference r where r.lane_id = k.lane_id and r.destination = k.destination);
        end if;
        -- What has waited longest: lanes that are due.
        select array_agg(d.lane_id) as lane, array_agg(d.destination) as destination,
            array_agg(d.partition) as partition, array_agg(d.stream_seq) as stream_seq,
            array_agg(d.version) as version, array_agg(d.message_id) as message_id, count(*)::int4 as size,
            count(distinct (d.lane_id, d.destination))::int4 as lanes
        into v_due
        from (
            select r.*
            from (
                select k.* from wh_parked k
                where k.due <= v_now and k.partition = any (
                    array(select p.partition from wh_partition p
                        where p.owner = p_incarnation and not (p.partition = any (v_leaving))))
                    and exists (
                        select from wh_parked_reference r where r.lane_id = k.lane_id and r.destination = k.destination)
                order by k.due
                limit p_streams_max
            ) k
            cross join lateral (
                select r.lane_id, r.destination, r.partition, r.stream_seq, r.version,
                    coalesce(r.message_id, e.message_id) as message_id, coalesce(r.position, e.position) as position,
                    row_number() over (order by r.stream_seq) as place,
                    exists (select from wh_handed_out h
                        where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                            and h.stream_seq = r.stream_seq and h.beside) as is_out
                from (
                    select r.* from wh_parked_reference r
                    where r.lane_id = k.lane_id and r.destination = k.destination
                    order by r.stream_seq
                    limit p_stream_rows_max
                ) r
                left join wh_event_store e on r.version > 0 and e.stream_id = r.lane_id and e.version = r.version
            ) r
            where not r.is_out
                and not exists (
                    select from wh_handed_out h
                    where h.incarnation = p_incarnation and h.lane_id = k.lane_id and h.destination = k.destination
                        and not h.beside and not h.decided)
                -- Not what stands before an own one that has not been read yet.
                and (v_read.page_end is null or r.place > 1
                    or r.stream_seq = k.stream_seq or r.position <= v_read.page_end)
            order by k.due, r.lane_id, r.destination, r.stream_seq
            limit v_room
        ) d;
        if v_due.size > 0 then
            -- A follower goes only behind its head.
            insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, message_id, incarnation, partition,
                beside, destination)
            select 0, d.stream_seq, d.version, v_now, d.lane_id, d.message_id, p_incarnation, d.partition, true,
                d.destination
            from unnest(v_due.lane, v_due.destination, v_due.partition, v_due.stream_seq, v_due.version, v_due.message_id)
                d(lane_id, destination, partition, stream_seq, version, message_id)
            where not exists (
                select from wh_parked_reference r
                where r.lane_id = d.lane_id and r.destination = d.destination and r.stream_seq < d.stream_seq
                    and not exists (
                        select from wh_handed_out h
                        where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                            and h.stream_seq = r.stream_seq and h.beside)
                    and not exists (
                        select from unnest(v_due.lane, v_due.destination, v_due.stream_seq) o(lane_id, destination, stream_seq)
                        where o.lane_id = r.lane_id and o.destination = r.destination and o.stream_seq = r.stream_seq));
            v_room := v_room - v_due.size;
        end if;

        -- From the log: by position, so that of each lane it is what comes next.
        with fresh as (
            select f.lane_id, f.destination, f.turn,
                row_number() over in_lane as place, min(f.turn) over (partition by f.lane_id, f.destination) as lane_turn
            from unnest(v_read.lane, v_read.destination, v_read.state) with ordinality f(lane_id, destination, state, turn)
            where f.state = 0
            window in_lane as (partition by f.lane_id, f.destination order by f.turn)
        ), ranked as (
            select f.turn, f.place, dense_rank() over (order by f.lane_turn) as lane_place from fresh f
        )
        select array_agg(k.turn order by k.turn) into v_taken
        from (
            select r.turn::int4 as turn from ranked r
            where r.place <= p_stream_rows_max and r.lane_place <= p_streams_max - coalesce(v_due.lanes, 0)
            order by r.turn
            limit v_room
        ) k;
        if v_taken is not null then
            select array_agg(coalesce(e.message_id, o.message_id) order by t.turn) into v_message
            from unnest(v_taken) with ordinality t(element, turn)
            left join wh_event_store e on e.stream_id = v_read.lane[t.element]
                and e.version = nullif(v_read.version[t.element], 0)
            left join lateral (
                select o.message_id
                from wh_outbox o
                where o.segment = v_read.segment[t.element] and o.lane_id = v_read.lane[t.element]
                    and o.stream_seq = case when v_read.version[t.element] = 0 then v_read.stream_seq[t.element] end
            ) o on true;
            insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, message_id, incarnation, partition,
                beside, decided, destination)
            select v_read.xid[t.element], v_read.stream_seq[t.element], v_read.version[t.element], v_now,
                v_read.lane[t.element], t.message_id, p_incarnation, v_read.partition[t.element], false,
                t.message_id is null, v_read.destination[t.element]
            from unnest(v_taken, v_message) t(element, message_id)
            on conflict do nothing;
        end if;

        -- Deleted before it was published: dead, alone.
        perform wh_settle_work(p_incarnation, p_dead_lane => array_agg(h.lane_id),
            p_dead_destination => array_agg(h.destination), p_dead_partition => array_agg(h.partition),
            p_dead_seq => array_agg(h.stream_seq), p_dead_version => array_agg(h.version),
            p_dead_attempts => array_agg(0), p_dead_reason => array_agg(7::int2),
            p_dead_error => array_agg('CL001: the message is not stored any more: it was deleted before it was published'::text),
            p_dead_error_cut => array_agg(false))
        from wh_handed_out h
        where h.incarnation = p_incarnation and h.handed_at = v_now and h.message_id is null
            and (h.beside or h.stream_seq = any (
                select v_read.stream_seq[t.element] from unnest(v_taken) t(element)
                where v_read.lane[t.element] = h.lane_id and v_read.destination[t.element] = h.destination))
        having count(*) > 0;
        delete from wh_handed_out h
        where h.incarnation = p_incarnation and h.handed_at = v_now and h.message_id is null and h.beside;
    end if;

    -- How far it has come. What stands as decided now was so before, or is so by now.
    if v_read.any_log then
        select array_agg(distinct r.xid) into v_open
        from unnest(v_read.xid, v_read.lane, v_read.destination, v_read.stream_seq, v_read.state)
            r(xid, lane_id, destination, stream_seq, state)
        where r.state <> 2 and not exists (
            select from wh_handed_out h
            where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                and h.stream_seq = r.stream_seq and not h.beside and h.decided);
    end if;
    if v_read.page_end is not null then
        select l.xid into v_unread
        from wh_log l
        where l.xid >= v_read.begun_xmax and l.xid < v_read.read_xmax and l.position > v_read.page_end
        order by l.xid limit 1;
        v_rest := array(
            select x from unnest(v_read.begun_listed) x
            where exists (select from wh_log l where l.xid = x and l.position > v_read.page_end));
    end if;
    v_open := coalesce(v_open, '{}') || v_read.running || coalesce(v_rest, '{}');
    v_xmax := least(v_read.read_xmax, coalesce(v_unread, v_read.read_xmax));
    select x into v_cut
    from (select distinct x from unnest(v_open) x where x < v_xmax) o
    order by x offset 1000 limit 1;
    v_cursor := wh_snapshot_of(least(v_xmax, coalesce(v_cut, v_xmax)), v_open);
    select i.ownership into v_ownership from wh_instance i where i.number = p_incarnation;
    if v_read.any_log then
        insert into wh_cursor (ownership, incarnation, shard, resolved)
        select v_ownership, p_incarnation, 0, v_cursor
        where exists (select from wh_partition p where p.owner = p_incarnation)
            and v_cursor::text is distinct from (
                select c.resolved::text from wh_cursor c
                where c.incarnation = p_incarnation and c.shard = 0 and c.ownership = v_ownership
                order by c.number desc limit 1);
        delete from wh_handed_out h
        where h.incarnation = p_incarnation and h.decided and not h.beside
            and pg_visible_in_snapshot(h.xid::text::xid8, v_cursor);
    end if;

    if cardinality(v_leaving) > 0 then
        v_gone := array(
            select g from unnest(v_leaving) g
            where not exists (
                select from wh_handed_out h
                where h.incarnation = p_incarnation and h.partition = g and not h.decided
                    and h.handed_at > v_now - p_lease_ms * interval '1 millisecond'));
        if cardinality(v_gone) > 0 then
            v_resolved := array(
                select wh_snapshot_of(v_xmax, v_read.running || coalesce(v_rest, '{}') || array(
                    select r.xid
                    from unnest(v_read.xid, v_read.lane, v_read.destination, v_read.partition, v_read.stream_seq,
                        v_read.state) r(xid, lane_id, destination, partition, stream_seq, state)
                    where r.partition = g.partition and r.state <> 2 and not exists (
                        select from wh_handed_out h
                        where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                            and h.stream_seq = r.stream_seq and not h.beside and h.decided)))
                from unnest(v_gone) with ordinality g(partition, turn)
                order by g.turn);
            perform release_partitions(p_incarnation, wh_epoch_token(), v_gone, v_resolved);
            delete from wh_handed_out h where h.incarnation = p_incarnation and h.partition = any (v_gone);
        end if;
    end if;
end
$$;

CREATE FUNCTION corelane.wh_inbox_day(message_id uuid) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select case
        when pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 6) >> 4 = 7
            and pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 8) >> 6 = 2 then ((
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 0) * 1099511627776::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 1) * 4294967296::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 2) * 16777216::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 3) * 65536::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 4) * 256::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 5)
            ) / 86400000)::int4
        else -1
    end
$$;

CREATE FUNCTION corelane.wh_inbox_key(consumer smallint, lane_id uuid) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select pg_catalog.uuid_hash(lane_id) # pg_catalog.hashint2(consumer)
$$;

CREATE FUNCTION corelane.wh_inbox_place(day integer, today integer, has_part boolean) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    select case
        when day < 0 then 0
        when day > today + 2 then 2
        when day = today + 2 then 1
        when has_part or day >= today - 1 then 0
        when day = today - 2 then 1
        else 2
    end
$$;

CREATE FUNCTION corelane.wh_json(p_content_type text, p_bytes bytea) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
    if p_bytes is null or not coalesce(
        btrim(split_part(p_content_type, ';', 1)) ~* '^(application/json|.*\+json|)$', true)
    then
        return null;
    end if;
    return convert_from(p_bytes, 'UTF8')::jsonb;
exception
    when data_exception or program_limit_exceeded then
        return null;
end
$_$;

CREATE FUNCTION corelane.wh_lane(message_id uuid) RETURNS uuid
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select pg_catalog.encode(pg_catalog.set_byte(pg_catalog.uuid_send(message_id), 8,
        pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 8) # 128), 'hex')::pg_catalog.uuid
$$;

CREATE FUNCTION corelane.wh_lease_inbox(p_worker uuid, p_consumer smallint, p_lease interval, p_max_lanes integer, p_max_rows integer, p_max_bytes bigint, OUT messages uuid[], OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
declare
    v_now timestamptz := clock_timestamp();
    v_locked uuid[];
    v_is_full bool;
begin
    messages := '{}';
    more := false;
    if p_max_lanes = 0 then
        return;
    end if;
    v_locked := array(
        select l.lane_id
        from (
            select k.lane_id from wh_inbox_parked k
            where k.consumer = p_consumer and k.due < 'infinity' and k.due <= v_now
            order by k.due limit greatest(100 * p_max_lanes, 1000)
        ) l
        where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, l.lane_id))
        limit p_max_lanes);
    if cardinality(v_locked) = 0 then
        return;
    end if;

    -- Later statements than the locks: another one may have handled a lane meanwhile.
    v_is_full := cardinality(v_locked) = p_max_lanes;
    v_locked := array(
        select k.lane_id from wh_inbox_parked k
        where k.consumer = p_consumer and k.lane_id = any (v_locked)
        order by k.lane_id
        for update skip locked);
    with lane as (
        select k.lane_id, k.due from wh_inbox_parked k
        where k.consumer = p_consumer and k.lane_id = any (v_locked) and k.due <= v_now
    ), kept as (
        select i.lane_id, i.message_id, i.arrival, row_number() over w as nth, sum(i.bytes) over w as bytes
        from lane l
        cross join lateral (
            select i.lane_id, i.message_id, i.arrival,
                octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) as bytes
            from wh_inbox i
            where i.consumer = p_consumer and i.lane_id = l.lane_id
            order by i.arrival
            limit p_max_rows + 1
        ) i
        window w as (order by l.due, l.lane_id, i.arrival)
    ), fitting as (
        select k.*, k.nth = 1 or k.nth <= p_max_rows and k.bytes <= p_max_bytes as fits from kept k
    ), leased as (
        update wh_inbox_parked k
        set due = clock_timestamp() + p_lease, leased_to = p_worker, leased_through = f.arrival,
            leased_rows = f.rows
        from (
            select f.lane_id, max(f.arrival) as arrival, count(*) as rows from fitting f where f.fits group by f.lane_id
        ) f
        where k.consumer = p_consumer and k.lane_id = f.lane_id
    )
    select coalesce(array_agg(f.message_id order by f.nth) filter (where f.fits), '{}'),
        coalesce(bool_or(not f.fits), false) or v_is_full
    into messages, more
    from fitting f;
    -- Somebody has deleted what was kept.
    perform unpark_inbox(p_consumer, array(
        select u.lane_id from unnest(v_locked) u(lane_id)
        where not exists (select from wh_inbox i where i.consumer = p_consumer and i.lane_id = u.lane_id)));
end
$$;

CREATE FUNCTION corelane.wh_lock_class(kind integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select ('"corelane"'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.int8 * 8 + kind)::pg_catalog.bit(32)::pg_catalog.int4
$$;

CREATE FUNCTION corelane.wh_lock_owners(p_partitions integer[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_locked int4[] := '{}';
    v_owners int4[];
    v_owner int4;
begin
    for turn in 1..5 loop
        -- A later statement than the locks.
        select coalesce(array_agg(distinct p.owner order by p.owner), '{}') into v_owners
        from wh_partition p where p.partition = any (p_partitions) and p.owner is not null;
        if v_owners <@ v_locked then
            return;
        end if;
        foreach v_owner in array v_owners loop
            perform pg_advisory_xact_lock(wh_lock_class(3), v_owner);
        end loop;
        v_locked := v_locked || v_owners;
    end loop;
    raise exception 'the partitions change their owners: run it again' using errcode = '40001';
end
$$;

CREATE FUNCTION corelane.wh_make_inbox_days(p_days_ahead integer, OUT made integer, OUT skipped integer) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'corelane', 'pg_temp'
    AS $_$
declare
    v_today constant int4 := extract(epoch from clock_timestamp())::int8 / 86400;
    v_day int4;
    v_is_made bool;
    v_lock_timeout text;
begin
    made := 0;
    skipped := 0;
    perform wh_require('p_days_ahead', p_days_ahead, 1, 366);
    if not exists (
            select from generate_series(v_today, v_today + p_days_ahead) d
            where not exists (select from wh_inbox_part p where p.day = d))
        or not pg_try_advisory_xact_lock(wh_lock_class(6), 3) then
        return;
    end if;
    v_lock_timeout := current_setting('lock_timeout');
    perform set_config('lock_timeout', '50ms', true);
    -- A later statement than the lock.
    for v_day in
        select d from generate_series(v_today, v_today + p_days_ahead) d
        where not exists (select from wh_inbox_part p where p.day = d)
        order by d
    loop
        begin
            lock table only wh_inbox_seen in share update exclusive mode;
            lock table wh_inbox_seen_other in access exclusive mode;
            v_is_made := not exists (select from wh_inbox_seen_other o where o.day = v_day);
            if v_is_made then
                execute format('create table wh_inbox_seen_%s (like wh_inbox_seen)', v_day);
                execute format('alter table wh_inbox_seen attach partition wh_inbox_seen_%1$s for values in (%1$s)', v_day);
            end if;
            insert into wh_inbox_part (day, is_made) values (v_day, v_is_made);
            made := made + v_is_made::int4;
            skipped := skipped + (not v_is_made)::int4;
        exception when lock_not_available then
            exit;
        end;
    end loop;
    perform set_config('lock_timeout', v_lock_timeout, true);
end
$_$;

CREATE FUNCTION corelane.wh_match_dead_letters(p_all boolean, p_ids bigint[], p_destination text, p_type text, p_reason smallint, p_fingerprint text, p_stream uuid, p_dead_from timestamp with time zone, p_dead_before timestamp with time zone, p_after bigint, p_rows_max integer) RETURNS TABLE(dead_letter_id bigint)
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET plan_cache_mode TO 'force_custom_plan'
    AS $$
#variable_conflict use_column
begin
    if not coalesce(p_all, false) and num_nonnulls(p_ids, p_destination, p_type, p_reason, p_fingerprint, p_stream,
        p_dead_from, p_dead_before) = 0 then
        raise exception 'a filter of dead letters is empty: name what is meant, or say p_all => true'
            using errcode = '22023';
    end if;
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    return query
    select d.dead_letter_id
    from wh_dead_letter d
    where d.dead_letter_id > coalesce(p_after, 0)
        and (p_ids is null or d.dead_letter_id = any (p_ids))
        and (p_destination is null or d.destination = p_destination)
        and (p_type is null or case
            when right(p_type, 1) = '*' then starts_with(d.type_name, left(p_type, -1)) else d.type_name = p_type end)
        and (p_reason is null or d.reason = p_reason)
        and (p_fingerprint is null or d.error_fingerprint = p_fingerprint)
        and (p_stream is null or d.stream_id = p_stream)
        and (p_dead_from is null or d.dead_at >= p_dead_from)
        and (p_dead_before is null or d.dead_at < p_dead_before)
    order by d.dead_letter_id
    limit p_rows_max;
end
$$;

CREATE FUNCTION corelane.wh_match_events(p_all boolean, p_streams uuid[], p_version_from bigint, p_version_to bigint, p_position_from bigint, p_position_to bigint, p_type text, p_stored_from timestamp with time zone, p_stored_before timestamp with time zone, p_after bigint, p_rows_max integer, OUT stream_ids uuid[], OUT versions bigint[], OUT last_position bigint, OUT more boolean) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_custom_plan'
    AS $$
#variable_conflict use_column
declare
    v_from int8 := greatest(coalesce(p_after, 0), coalesce(p_position_from, 1) - 1);
    v_end constant int8 := least(coalesce(p_position_to, 9223372036854775807),
        coalesce(pg_sequence_last_value('wh_position'::regclass), 0) + 4095);
    v_width int8 := 4096 * 1024;
    v_to int8;
    v_room int4 := 100000;
    v_low int8 := coalesce(p_version_from, 1);
    v_high int8;
    v_middle record;
    v_part record;
    v_positions int8[];
begin
    if not coalesce(p_all, false) and num_nonnulls(p_streams, p_position_from, p_position_to, p_type, p_stored_from,
        p_stored_before) = 0 then
        raise exception 'a filter of events is empty: name what is meant, or say p_all => true' using errcode = '22023';
    end if;
    if num_nonnulls(p_version_from, p_version_to) > 0 and p_streams is null or cardinality(p_streams) > 1000 then
        raise exception 'versions are those of streams that are named, at most 1000 of them' using errcode = '22023';
    end if;
    stream_ids := '{}';
    versions := '{}';
    last_position := v_from;
    more := false;

    if p_streams is not null then
        -- Of one long stream, pages begin where the one before ended: positions ascend along it.
        if cardinality(p_streams) = 1 and v_from > 0 then
            select max(e.version) + 1 into v_high from wh_event_store e where e.stream_id = p_streams[1];
            while v_low < v_high loop
                select e.version, e.position into v_middle
                from wh_event_store e
                where e.stream_id = p_streams[1] and e.version >= v_low + (v_high - v_low) / 2
                order by e.version limit 1;
                if v_middle.position <= v_from then
                    v_low := v_middle.version + 1;
                else
                    v_high := v_low + (v_high - v_low) / 2;
                end if;
            end loop;
        end if;
        select array_agg(e.stream_id order by e.position), array_agg(e.version order by e.position),
            array_agg(e.position order by e.position)
        into stream_ids, versions, v_positions
        from (
            select e.stream_id, e.version, e.position
            from (select distinct s.id from unnest(p_streams) s(id)) s
            cross join lateral (
                select e.stream_id, e.version, e.position
                from wh_event_store e
                where e.stream_id = s.id and e.version >= v_low
                    and e.version <= coalesce(p_version_to, 9223372036854775807)
                    and e.position > v_from and e.position <= v_end
                    and (p_type is null or case when right(p_type, 1) = '*' then starts_with(e.type_name, left(p_type, -1))
                        else e.type_name = p_type end)
                    and (p_stored_from is null or e.stored_at >= p_stored_from)
                    and (p_stored_before is null or e.stored_at < p_stored_before)
                order by e.version
                limit p_rows_max + 1
            ) e
            order by e.position
            limit p_rows_max + 1
        ) e;
        stream_ids := coalesce(stream_ids, '{}');
        versions := coalesce(versions, '{}');
        more := cardinality(versions) > p_rows_max;
        stream_ids := stream_ids[1 : p_rows_max];
        versions := versions[1 : p_rows_max];
        last_position := case when more then v_positions[p_rows_max] else greatest(v_from, v_end) end;
        return;
    end if;

    -- By position there is no index that gives an order: windows of it, ever wider while little is found in them.
    while v_from < v_end loop
        v_to := v_from + least(v_width, v_end - v_from);
        select count(*) as looked, max(l.position) as last,
            coalesce(array_agg(l.stream_id order by l.position) filter (where l.fits), '{}') as stream_ids,
            coalesce(array_agg(l.version order by l.position) filter (where l.fits), '{}') as versions,
            coalesce(array_agg(l.position order by l.position) filter (where l.fits), '{}') as positions
        into v_part
        from (
            select e.position, e.stream_id, e.version,
                (p_type is null or case when right(p_type, 1) = '*' then starts_with(e.type_name, left(p_type, -1))
                    else e.type_name = p_type end)
                and (p_stored_from is null or e.stored_at >= p_stored_from)
                and (p_stored_before is null or e.stored_at < p_stored_before) as fits
            from wh_event_store e
            where e.position > v_from and e.position <= v_to
            order by e.position
            limit v_room + 1
        ) l;
        v_from := case when v_part.looked > v_room then v_part.last else v_to end;
        if cardinality(versions) + cardinality(v_part.versions) > p_rows_max then
            more := true;
            v_from := v_part.positions[p_rows_max - cardinality(versions)];
        end if;
        stream_ids := (stream_ids || v_part.stream_ids)[1 : p_rows_max];
        versions := (versions || v_part.versions)[1 : p_rows_max];
        v_room := v_room - v_part.looked;
        exit when more or v_room <= 0;
        v_width := v_width * 4;
    end loop;
    last_position := v_from;
    more := more or v_from < v_end;
end
$$;

CREATE FUNCTION corelane.wh_match_in_hand(p_incarnation integer, p_message_ids uuid[], p_destinations text[]) RETURNS TABLE(turn bigint, message_id uuid, lane_id uuid, destination text, partition integer, stream_seq bigint, version bigint, beside boolean)
    LANGUAGE sql STABLE
    AS $$
    select w.turn, h.message_id, h.lane_id, h.destination, h.partition, h.stream_seq, h.version, h.beside
    from unnest(p_message_ids, p_destinations) with ordinality w(message_id, destination, turn)
    join "corelane".wh_handed_out h on h.incarnation = p_incarnation and h.message_id = w.message_id
        and (w.destination is null or h.destination = w.destination) and not h.decided
$$;

CREATE FUNCTION corelane.wh_match_inbox_dead_letters(p_all boolean, p_ids bigint[], p_consumer text, p_source text, p_type text, p_reason smallint, p_fingerprint text, p_stream uuid, p_dead_from timestamp with time zone, p_dead_before timestamp with time zone, p_after bigint, p_rows_max integer) RETURNS TABLE(dead_letter_id bigint)
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET plan_cache_mode TO 'force_custom_plan'
    AS $$
#variable_conflict use_column
begin
    if not coalesce(p_all, false) and num_nonnulls(p_ids, p_consumer, p_source, p_type, p_reason, p_fingerprint,
        p_stream, p_dead_from, p_dead_before) = 0 then
        raise exception 'a filter of dead letters is empty: name what is meant, or say p_all => true'
            using errcode = '22023';
    end if;
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    return query
    select d.dead_letter_id
    from wh_inbox_dead_letter d
    where d.dead_letter_id > coalesce(p_after, 0)
        and (p_ids is null or d.dead_letter_id = any (p_ids))
        and (p_consumer is null or d.consumer = (select c.consumer from wh_consumer c where c.name = p_consumer))
        and (p_source is null or d.source = p_source)
        and (p_type is null or case
            when right(p_type, 1) = '*' then starts_with(d.type_name, left(p_type, -1)) else d.type_name = p_type end)
        and (p_reason is null or d.reason = p_reason)
        and (p_fingerprint is null or d.error_fingerprint = p_fingerprint)
        and (p_stream is null or d.stream_id = p_stream)
        and (p_dead_from is null or d.dead_at >= p_dead_from)
        and (p_dead_before is null or d.dead_at < p_dead_before)
    order by d.dead_letter_id
    limit p_rows_max;
end
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

CREATE FUNCTION corelane.wh_open_place(p_place text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_place jsonb;
    v_at wh_feed_place;
    v_epoch uuid;
    v_installation wh_installation;
    v_generation int4;
    v_rebased int8;
    v_is_same_life bool;
    v_is_done bool;
begin
    select i.* into strict v_installation from wh_installation i;
    select e.token into v_epoch from wh_epoch e;
    if v_epoch is null then
        v_epoch := wh_epoch_token();
    end if;
    begin
        v_place := p_place::jsonb;
        if v_place ->> 'feed' is distinct from '1' then
            raise exception 'its form is %', coalesce(v_place ->> 'feed', 'not said') using errcode = '22023';
        end if;
        v_generation := (v_place ->> 'generation')::int4;
        v_rebased := (v_place ->> 'rebased')::int8;
        v_is_same_life := v_generation = v_installation.generation and (v_place ->> 'epoch')::uuid = v_epoch;
        if v_is_same_life then
            v_at := jsonb_populate_record(null::wh_feed_place, v_place -> 'at');
        else
            v_at := jsonb_populate_record(null::wh_feed_place, v_place -> 'proved');
            v_at.ceiling := null;
            v_at.quiet := false;
        end if;
        if num_nulls(v_is_same_life, v_generation, v_rebased, (v_place ->> 'server')::int8, (v_place ->> 'proved_at')::numeric, v_at.started,
            v_at.read, v_at.floor, v_at.target_floor, v_at.position, v_at.quiet, v_at.before_from, v_at.before_read,
            v_at.before_position, v_at.before_is_foreign) > 0
        then
            raise exception 'parts of it are missing' using errcode = '22023';
        end if;
        if coalesce(v_at."window", 1) < 1 or v_at.position < 0 then
            raise exception 'a window of %, a position of %', v_at."window", v_at.position using errcode = '22023';
        end if;
    exception
        when data_exception or program_limit_exceeded then
            raise exception 'this is no place in a feed: %', sqlerrm
                using errcode = 'CL022', hint = 'Keep the text as it was answered, or begin behind a position (begin_feed).';
    end;
    if v_generation > v_installation.generation
        or v_generation = v_installation.generation and not v_is_same_life
        and greatest(pg_snapshot_xmax(v_at.read), pg_snapshot_xmax(v_at.target)) > pg_snapshot_xmax(pg_current_snapshot())
    then
        raise exception 'the place lies ahead of this server, which has lost transactions (a restore to an earlier time, '
            'a failover): events under ids given again would be skipped'
            using errcode = 'CL023', hint = 'Begin behind a position that was read (begin_feed).';
    end if;
    if v_generation < v_installation.generation then
        -- As `rebase` does it for subscriptions.
        v_is_done := v_at.before_from >= v_rebased;
        v_at.before_from := case when v_is_done then v_rebased
            else greatest(v_at.before_from, case when v_at.target is null then 0 else least(v_at.position, v_rebased) end) end;
        v_is_done := v_is_done and v_generation + 1 = v_installation.generation;
        v_at.before_read := case when v_is_done then v_at.read else '1:1:' end;
        v_at.before_target := case when v_is_done then v_at.target end;
        v_at.before_position := case when v_is_done and v_at.target is not null then v_at.position else 0 end;
        v_at.before_is_foreign := (v_place ->> 'server')::int8 <> v_installation.system_identifier;
        v_at.floor := v_installation.rebased_position;
        v_at.read := '1:1:';
        v_at.target := null;
        v_at.target_floor := 0;
        v_at.position := 0;
        v_place := v_place || jsonb_build_object(
            'server', v_installation.system_identifier, 'generation', v_installation.generation,
            'rebased', v_installation.rebased_position);
    end if;
    if v_is_same_life then
        return v_place;
    end if;
    return v_place || jsonb_build_object('epoch', v_epoch, 'at', v_at, 'proved', v_at);
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

CREATE FUNCTION corelane.wh_prove_place(p_xmax xid8) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    if pg_current_xact_id() < p_xmax then
        return false;
    end if;
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    perform pg_logical_emit_message(true, 'corelane', '');
    return true;
end
$$;

CREATE FUNCTION corelane.wh_read_edge(OUT edge pg_snapshot, OUT floor bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
declare
    v_beyond int8;
    v_first bool := pg_current_xact_id_if_assigned() is null
        and coalesce(current_setting('corelane.edge_read', true), '') <> 'yes';
begin
    -- In this order: who gets an id from `age` on gets it, and draws, after `floor` was read. A draw is 4,096 positions.
    floor := coalesce(pg_sequence_last_value('wh_position') + 4095, 0);
    v_beyond := age('3'::xid)::int8 + 3;
    edge := pg_current_snapshot();
    perform set_config('corelane.edge_read', 'yes', true);
    v_beyond := (v_beyond - pg_snapshot_xmax(edge)::text::int8) & 4294967295;
    if v_beyond >= 2147483648 then
        v_beyond := 0; -- Some of them have completed meanwhile.
    end if;
    if not v_first or v_beyond > 5000 then
        floor := -1;
    elsif v_beyond > 0 then
        edge := wh_snapshot_of(pg_snapshot_xmax(edge)::text::int8 + v_beyond,
            array(select x::text::int8 from pg_snapshot_xip(edge) x)
            || array(select generate_series(pg_snapshot_xmax(edge)::text::int8,
                pg_snapshot_xmax(edge)::text::int8 + v_beyond - 1)));
    end if;
end
$$;

CREATE FUNCTION corelane.wh_read_undecided(p_incarnation integer, p_leaving integer[], p_fresh_max integer, p_stream_rows_max integer, OUT read_xmax bigint, OUT running bigint[], OUT begun_xmax bigint, OUT begun_listed bigint[], OUT page_end bigint, OUT any_log boolean, OUT xid bigint[], OUT segment smallint[], OUT lane uuid[], OUT destination text[], OUT partition integer[], OUT stream_seq bigint[], OUT version bigint[], OUT state smallint[]) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
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

CREATE FUNCTION corelane.wh_receive_inbox(p_consumer smallint, p_messages uuid[], p_stream_ids uuid[], p_types text[], p_payloads bytea[], p_source text, p_content_types text[], p_metadata bytea[], p_correlation_ids uuid[], p_causation_ids uuid[], p_trace_ids uuid[], p_span_ids bigint[], p_trace_flags smallint[]) RETURNS smallint[]
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
declare
    v_lanes uuid[];
    v_locked uuid[];
    v_ids uuid[];
    v_new bool[];
    v_stored uuid[];
    v_turns int8[];
begin
    if cardinality(p_types) <> cardinality(p_messages) or cardinality(p_payloads) <> cardinality(p_messages)
        or cardinality(p_stream_ids) not in (0, cardinality(p_messages))
        or array_position(p_messages, null) is not null
    then
        raise exception 'deliveries: % message ids, % streams, % types, % payloads, and no null among the ids',
            cardinality(p_messages), cardinality(p_stream_ids), cardinality(p_types), cardinality(p_payloads)
            using errcode = '22023';
    end if;
    if '00000000-0000-0000-0000-000000000000' = any (p_stream_ids) then
        raise exception 'the nil uuid is not a stream id' using errcode = '22023',
            hint = 'Give null for a message without order, or its real stream.';
    end if;
    v_lanes := array(
        select coalesce(m.stream_id, wh_lane(m.message_id))
        from unnest(p_messages, p_stream_ids) with ordinality m(message_id, stream_id, turn)
        where m.message_id is not null order by m.turn);
    v_locked := array(
        select l.lane_id from (select distinct u.lane_id from unnest(v_lanes) u(lane_id) offset 0) l
        where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, l.lane_id)));

    -- Later statements than the locks: who had them before has committed.
    v_ids := array(
        select m.message_id from unnest(p_messages, v_lanes) with ordinality m(message_id, lane_id, turn)
        where m.lane_id = any (v_locked) order by m.turn);
    v_new := remember_inbox(p_consumer, v_ids);
    v_stored := array(select n.message_id from unnest(v_ids, v_new) n(message_id, is_new) where n.is_new);
    -- Of the same id the first counts.
    v_turns := array(
        select min(m.turn) from unnest(p_messages, v_lanes) with ordinality m(message_id, lane_id, turn)
        where m.message_id = any (v_stored) and m.lane_id = any (v_locked)
        group by m.message_id);
    perform keep_inbox(p_consumer, p_source, array_agg(m.lane_id order by m.turn),
        array_agg(m.message_id order by m.turn), array_agg(m.stream_id order by m.turn),
        array_agg(m.type_name order by m.turn), array_agg(m.payload order by m.turn),
        array_agg(m.content_type order by m.turn), array_agg(m.metadata order by m.turn),
        array_agg(m.correlation_id order by m.turn), array_agg(m.causation_id order by m.turn),
        array_agg(m.trace_id order by m.turn), array_agg(m.span_id order by m.turn),
        array_agg(m.trace_flags order by m.turn))
    from unnest(v_lanes, p_messages, p_stream_ids, p_types, p_payloads, p_content_types, p_metadata, p_correlation_ids,
        p_causation_ids, p_trace_ids, p_span_ids, p_trace_flags) with ordinality
        m(lane_id, message_id, stream_id, type_name, payload, content_type, metadata, correlation_id, causation_id,
            trace_id, span_id, trace_flags, turn)
    where m.turn = any (v_turns)
    having count(*) > 0;
    insert into wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
    select distinct on (m.lane_id) clock_timestamp(), m.lane_id, m.message_id,
        compute_partition(m.lane_id, (select i.partition_count from wh_installation i)), 0, p_consumer, 0
    from unnest(v_lanes, p_messages) with ordinality m(lane_id, message_id, turn)
    where m.turn = any (v_turns)
    order by m.lane_id, m.turn
    on conflict (consumer, lane_id) do nothing;
    return array(
        select (case
            when m.turn = any (v_turns) then 0
            when not m.lane_id = any (v_locked) then 2
            else 1 end)::int2
        from unnest(v_lanes) with ordinality m(lane_id, turn) order by m.turn);
end
$$;

CREATE FUNCTION corelane.wh_require(p_name text, p_value bigint, p_least bigint, p_most bigint) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    AS $$
begin
    if p_value is null or p_value not between p_least and p_most then
        raise exception '% = %: must be % to %', p_name, coalesce(p_value::text, 'null'), p_least, p_most
            using errcode = '22023';
    end if;
end
$$;

CREATE FUNCTION corelane.wh_sentinel(p_unpublished_ms bigint, p_stuck_ms bigint, OUT unpublished integer, OUT unpublished_age_ms bigint, OUT overdue integer, OUT stuck integer, OUT stuck_age_ms bigint, OUT held integer) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION corelane.wh_settle_work(p_incarnation integer, p_park_lane uuid[] DEFAULT '{}'::uuid[], p_park_destination text[] DEFAULT '{}'::text[], p_park_partition integer[] DEFAULT '{}'::integer[], p_park_seq bigint[] DEFAULT '{}'::bigint[], p_park_attempts integer[] DEFAULT '{}'::integer[], p_park_reason smallint[] DEFAULT '{}'::smallint[], p_park_error text[] DEFAULT '{}'::text[], p_park_error_cut boolean[] DEFAULT '{}'::boolean[], p_park_due_in_ms bigint[] DEFAULT '{}'::bigint[], p_spill_lane uuid[] DEFAULT '{}'::uuid[], p_spill_destination text[] DEFAULT '{}'::text[], p_spill_partition integer[] DEFAULT '{}'::integer[], p_spill_seq bigint[] DEFAULT '{}'::bigint[], p_spill_version bigint[] DEFAULT '{}'::bigint[], p_drained_lane uuid[] DEFAULT '{}'::uuid[], p_drained_destination text[] DEFAULT '{}'::text[], p_drained_partition integer[] DEFAULT '{}'::integer[], p_drained_seq bigint[] DEFAULT '{}'::bigint[], p_dead_lane uuid[] DEFAULT '{}'::uuid[], p_dead_destination text[] DEFAULT '{}'::text[], p_dead_partition integer[] DEFAULT '{}'::integer[], p_dead_seq bigint[] DEFAULT '{}'::bigint[], p_dead_version bigint[] DEFAULT '{}'::bigint[], p_dead_attempts integer[] DEFAULT '{}'::integer[], p_dead_reason smallint[] DEFAULT '{}'::smallint[], p_dead_error text[] DEFAULT '{}'::text[], p_dead_error_cut boolean[] DEFAULT '{}'::boolean[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
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

CREATE FUNCTION corelane.wh_share_partitions(p_incarnation integer, p_lease_ms bigint, OUT leaving integer[], OUT members integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    AS $$
declare
    v_now constant timestamptz := clock_timestamp();
    v_late record;
    v_share int4;
    v_held int4;
    v_free int4[];
begin
    if exists (select from wh_instance i where i.state = 0 and i.lease_until < v_now and i.number <> p_incarnation)
        or exists (select from wh_worker_watch w where w.incarnation = p_incarnation)
    then
        delete from wh_worker_watch w
        where w.incarnation = p_incarnation and not exists (
            select from wh_instance i
            where i.number = w.watched and i.state = 0 and i.counter = w.counter and i.lease_until < v_now);
        insert into wh_worker_watch as w (counter, looked_at, incarnation, watched)
        select i.counter, v_now, p_incarnation, i.number
        from wh_instance i
        where i.state = 0 and i.lease_until < v_now and i.number <> p_incarnation
        on conflict (incarnation, watched) do update
        set looked_at = v_now, watched_ms = w.watched_ms
            + least(1000, greatest(0, extract(epoch from v_now - w.looked_at) * 1000))::int8;
        for v_late in
            select w.watched, w.counter from wh_worker_watch w
            where w.incarnation = p_incarnation and w.watched_ms >= p_lease_ms
                and pg_try_advisory_xact_lock(wh_lock_class(3), w.watched)
            order by w.watched
        loop
            perform mark_dead(v_late.watched, v_late.counter, false);
        end loop;
    end if;

    with claimant as (
        select i.number, i.id, coalesce(o.held, 0) as held
        from wh_instance i
        left join (select p.owner, count(*)::int4 as held from wh_partition p group by p.owner) o on o.owner = i.number
        where i.state = 0 and (i.number = p_incarnation or i.lease_until > v_now and coalesce(i.owns, o.held > 0))
    ), ranked as (
        select c.*, row_number() over (order by c.held desc, c.id) as place, count(*) over () as claimants
        from claimant c
    )
    select r.claimants, r.held, n.partition_count / r.claimants + (r.place <= n.partition_count % r.claimants)::int4
    into strict members, v_held, v_share
    from ranked r, wh_installation n
    where r.number = p_incarnation;

    leaving := '{}';
    if v_held < v_share then
        v_free := array(
            select p.partition from wh_partition p where p.owner is null order by p.partition limit v_share - v_held);
        if cardinality(v_free) > 0 then
            -- Cursors of before say nothing of a larger set: what they have resolved becomes the bases.
            update wh_partition p
            set base = wh_snapshot_union(r.base, r.cursor)
            from wh_resolved r
            where r.partition = p.partition and p.owner = p_incarnation and r.cursor::text <> '1:1:';
            perform take_partitions(p_incarnation, v_free);
        end if;
    elsif v_held > v_share then
        leaving := array(
            select p.partition
            from wh_partition p
            left join (
                select h.partition, count(*) as size from wh_handed_out h
                where h.incarnation = p_incarnation and not h.decided
                    and h.handed_at > v_now - p_lease_ms * interval '1 millisecond'
                group by h.partition
            ) h on h.partition = p.partition
            where p.owner = p_incarnation
            order by coalesce(h.size, 0), p.partition
            limit v_held - v_share);
    end if;
end
$$;

CREATE FUNCTION corelane.wh_snapshot_of(p_xmax bigint, p_listed bigint[]) RETURNS pg_snapshot
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select (coalesce(min(l.x), p_xmax)::text || ':' || p_xmax::text || ':'
        || coalesce(string_agg(l.x::text, ',' order by l.x), ''))::pg_snapshot
    from (select distinct x from unnest(p_listed) x where x < p_xmax) l
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
        cross join lateral unnest(l.partition, l.stream_seq) u(partition, stream_seq)
        join wh_resolved r on r.partition = u.partition
        where u.stream_seq > 0 -- the others are words to owners
            and not pg_visible_in_snapshot(l.xid::text::xid8, r.base)
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
    union all
    (select format('consumer_%s', c.consumer), (select count(*) from wh_inbox i where i.consumer = c.consumer),
        format('messages kept for %s; %s lanes wait, %s of them for an operator%s; %s dead letters', c.name, k.parked, k.held,
            ', the longest since ' || k.oldest::timestamptz(0),
            (select count(*) from wh_inbox_dead_letter d where d.consumer = c.consumer))
    from wh_consumer c
    cross join lateral (
        select count(*) as parked, count(*) filter (where p.held) as held, min(p.parked_at) as oldest
        from wh_inbox_parked p where p.consumer = c.consumer
    ) k
    order by c.consumer)
    union all
    (select format('subscription_%s', s.subscription), m.events,
        format('events not read by %s, the oldest %s s old; all is read to position %s; %s members%s', s.name,
            m.oldest_age_ms / 1000, (
                select min(p.floor) from wh_subscription_partition p where p.subscription = s.subscription),
            m.members, nullif(format(', %s partitions WITHOUT ONE', m.partitions_free), ', 0 partitions WITHOUT ONE'))
    from wh_subscription s
    cross join lateral measure_subscription(s.name, 100000) m
    order by s.subscription)
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

CREATE FUNCTION corelane.wh_subscription_channel() RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select 'corelane_' || '"corelane"'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.text || '_events'
$$;

CREATE FUNCTION corelane.wh_take_dead_letters(p_all boolean, p_ids bigint[], p_destination text, p_type text, p_reason smallint, p_fingerprint text, p_stream uuid, p_dead_from timestamp with time zone, p_dead_before timestamp with time zone, p_after bigint, p_rows_max integer, p_dry_run boolean, OUT ids bigint[], OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 4096);
    ids := array(select m.dead_letter_id from wh_match_dead_letters(p_all, p_ids, p_destination, p_type, p_reason,
        p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max + 1) m);
    more := cardinality(ids) > p_rows_max;
    ids := ids[1 : p_rows_max];
    if not p_dry_run then
        perform from wh_dead_letter d where d.dead_letter_id = any (ids) order by d.dead_letter_id for update;
        perform wh_lock_owners(array(
            select distinct d.partition from wh_dead_letter d where d.dead_letter_id = any (ids)));
    end if;
end
$$;

CREATE FUNCTION corelane.wh_take_inbox_dead_letters(p_all boolean, p_ids bigint[], p_consumer text, p_source text, p_type text, p_reason smallint, p_fingerprint text, p_stream uuid, p_dead_from timestamp with time zone, p_dead_before timestamp with time zone, p_after bigint, p_rows_max integer, p_dry_run boolean, OUT ids bigint[], OUT more boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 4096);
    ids := array(select m.dead_letter_id from wh_match_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type,
        p_reason, p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max + 1) m);
    more := cardinality(ids) > p_rows_max;
    ids := ids[1 : p_rows_max];
    if not p_dry_run then
        perform from wh_inbox_dead_letter d where d.dead_letter_id = any (ids) order by d.dead_letter_id for update;
    end if;
end
$$;

CREATE FUNCTION corelane.wh_tell_lanes(p_lanes uuid[], p_destinations text[], p_partitions integer[], p_numbers bigint[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
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

CREATE FUNCTION corelane.wh_work_in_hand(p_incarnation integer, p_handed_at timestamp with time zone, p_again boolean) RETURNS TABLE(message_id uuid, destination text, stream_id uuid, stream_seq bigint, version bigint, "position" bigint, partition integer, fence bigint, attempts integer, status integer, flags integer, type_name text, content_type text, payload bytea, metadata bytea, correlation_id uuid, causation_id uuid, trace_id uuid, span_id bigint, trace_flags smallint, stored_at timestamp with time zone)
    LANGUAGE sql STABLE
    SET search_path TO 'corelane', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    AS $$
    select h.message_id, h.destination, coalesce(e.stream_id, o.stream_id, r.stream_id), h.stream_seq, h.version,
        coalesce(e.position, o.position, r.position), h.partition, p.fence, coalesce(k.attempts, 0),
        case when h.version > 0 then 3 else 1 end,
        case when h.handed_at is distinct from p_handed_at then 2 else 0 end + case when h.version > 0 then 8 else 0 end
            + case when k.attempts > 0 then 32 else 0 end,
        coalesce(e.type_name, o.type_name, r.type_name), coalesce(e.content_type, o.content_type, r.content_type),
        coalesce(e.payload, o.payload, r.payload), coalesce(e.metadata, o.metadata, r.metadata),
        coalesce(e.correlation_id, o.correlation_id, r.correlation_id),
        coalesce(e.causation_id, o.causation_id, r.causation_id), coalesce(e.trace_id, o.trace_id, r.trace_id),
        coalesce(e.span_id, o.span_id, r.span_id), coalesce(e.trace_flags, o.trace_flags, r.trace_flags),
        coalesce(e.stored_at, o.stored_at, r.stored_at)
    from wh_handed_out h
    join wh_partition p on p.partition = h.partition
    left join wh_event_store e on h.version > 0 and e.stream_id = h.lane_id and e.version = h.version
    left join wh_outbox o on h.version = 0 and not h.beside and o.lane_id = h.lane_id and o.stream_seq = h.stream_seq
    left join wh_parked_reference r on h.beside and r.lane_id = h.lane_id and r.destination = h.destination
        and r.stream_seq = h.stream_seq
    left join wh_parked k on k.lane_id = h.lane_id and k.destination = h.destination and k.stream_seq = h.stream_seq
    where h.incarnation = p_incarnation and not h.decided and (p_again or h.handed_at = p_handed_at)
    order by coalesce(e.position, o.position, r.position), h.destination
$$;

CREATE FUNCTION corelane.withdraw_instance(p_incarnation integer) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'corelane', 'pg_temp'
    AS $$
begin
    update wh_instance i set owns = false where i.number = p_incarnation and i.state = 0;
    return found;
end
$$;

CREATE TABLE corelane.wh_consumer (
    consumer smallint NOT NULL,
    name text NOT NULL,
    CONSTRAINT wh_consumer_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 255)))
);

ALTER TABLE corelane.wh_consumer ALTER COLUMN consumer ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_consumer_consumer_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

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
    payload bytea,
    retried integer DEFAULT 0 NOT NULL
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

CREATE VIEW corelane.wh_event_json WITH (security_invoker='true') AS
 SELECT e."position",
    e.stream_id,
    e.version,
    e.stream_seq,
    e.message_id,
    e.type_name,
    COALESCE(e.content_type, 'application/json'::text) AS content_type,
    corelane.wh_json(e.content_type, e.payload) AS payload,
    corelane.wh_json(NULL::text, e.metadata) AS metadata,
    e.correlation_id,
    e.causation_id,
    e.trace_id,
    e.partition,
    e.stored_at,
    e.payload AS payload_bytes,
    e.metadata AS metadata_bytes
   FROM corelane.wh_event_store e;

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

CREATE TABLE corelane.wh_handed_out (
    xid bigint NOT NULL,
    stream_seq bigint NOT NULL,
    version bigint NOT NULL,
    handed_at timestamp with time zone NOT NULL,
    lane_id uuid NOT NULL,
    message_id uuid,
    incarnation integer NOT NULL,
    partition integer NOT NULL,
    beside boolean NOT NULL,
    decided boolean DEFAULT false NOT NULL,
    destination text NOT NULL
)
WITH (fillfactor='80');

CREATE TABLE corelane.wh_inbox (
    arrival bigint NOT NULL,
    span_id bigint,
    received_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    retried integer DEFAULT 0 NOT NULL,
    consumer smallint NOT NULL,
    trace_flags smallint,
    source text NOT NULL,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
);

ALTER TABLE corelane.wh_inbox ALTER COLUMN arrival ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_inbox_arrival_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE corelane.wh_inbox_dead_letter (
    dead_letter_id bigint NOT NULL,
    arrival bigint NOT NULL,
    span_id bigint,
    received_at timestamp with time zone NOT NULL,
    dead_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    lane_id uuid NOT NULL,
    stream_id uuid,
    message_id uuid NOT NULL,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    attempts integer NOT NULL,
    retried integer NOT NULL,
    consumer smallint NOT NULL,
    trace_flags smallint,
    reason smallint NOT NULL,
    error_cut boolean DEFAULT false NOT NULL,
    source text NOT NULL,
    error text DEFAULT ''::text NOT NULL,
    error_fingerprint text NOT NULL,
    type_name text NOT NULL,
    content_type text,
    metadata bytea,
    payload bytea NOT NULL
);

ALTER TABLE corelane.wh_inbox_dead_letter ALTER COLUMN dead_letter_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_inbox_dead_letter_dead_letter_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE corelane.wh_inbox_parked (
    due timestamp with time zone NOT NULL,
    parked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    lane_id uuid NOT NULL,
    message_id uuid NOT NULL,
    partition integer NOT NULL,
    attempts integer NOT NULL,
    consumer smallint NOT NULL,
    reason smallint NOT NULL,
    held boolean DEFAULT false NOT NULL,
    error_cut boolean DEFAULT false NOT NULL,
    error text DEFAULT ''::text NOT NULL,
    leased_through bigint,
    leased_to uuid,
    leased_rows integer
);

CREATE TABLE corelane.wh_inbox_part (
    made_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    day integer NOT NULL,
    summarized_to integer DEFAULT 0 NOT NULL,
    is_made boolean NOT NULL
);

CREATE TABLE corelane.wh_inbox_seen (
    received_at timestamp with time zone NOT NULL,
    message_id uuid NOT NULL,
    day integer NOT NULL,
    consumer smallint NOT NULL
)
PARTITION BY LIST (day);

CREATE TABLE corelane.wh_inbox_seen_misdated (
    received_at timestamp with time zone NOT NULL,
    message_id uuid NOT NULL,
    day integer NOT NULL,
    consumer smallint NOT NULL
);

CREATE TABLE corelane.wh_inbox_seen_other (
    received_at timestamp with time zone NOT NULL,
    message_id uuid NOT NULL,
    day integer NOT NULL,
    consumer smallint NOT NULL
);

CREATE TABLE corelane.wh_inbox_seen_timeless (
    received_at timestamp with time zone NOT NULL,
    message_id uuid NOT NULL,
    day integer NOT NULL,
    consumer smallint NOT NULL
);

CREATE TABLE corelane.wh_inspection (
    only_row boolean DEFAULT true NOT NULL,
    inspected_at timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    inspector integer DEFAULT 0 NOT NULL,
    CONSTRAINT wh_inspection_only_row_check CHECK (only_row)
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
    error text DEFAULT ''::text NOT NULL,
    held boolean DEFAULT false NOT NULL
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
    payload bytea,
    retried integer DEFAULT 0 NOT NULL
);

CREATE TABLE corelane.wh_partition (
    fence bigint DEFAULT 0 NOT NULL,
    ownership bigint DEFAULT 0 NOT NULL,
    partition integer NOT NULL,
    owner integer,
    base pg_snapshot DEFAULT '1:1:'::pg_snapshot NOT NULL
);

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

CREATE VIEW corelane.wh_message_status AS
 WITH reference AS (
         SELECT r.lane_id,
            l.destination[r.destination] AS destination,
            r.stream_seq,
            r.version,
            r.partition,
            l.xid
           FROM (corelane.wh_log l
             CROSS JOIN LATERAL ( SELECT unnest(l.partition) AS partition,
                    unnest(l.destination_index) AS destination,
                    unnest(l.stream_seq) AS stream_seq,
                    unnest(l.version) AS version,
                    unnest(l.lane_id) AS lane_id) r)
          WHERE (r.stream_seq > 0)
        UNION ALL
         SELECT k_1.lane_id,
            k_1.destination,
            k_1.stream_seq,
            k_1.version,
            k_1.partition,
            NULL::bigint
           FROM corelane.wh_parked_reference k_1
        UNION ALL
         SELECT d_1.lane_id,
            d_1.destination,
            d_1.stream_seq,
            d_1.version,
            d_1.partition,
            NULL::bigint
           FROM corelane.wh_dead_letter d_1
        ), message AS (
         SELECT r.lane_id,
            r.destination,
            r.stream_seq,
            max(r.version) AS version,
            max(r.partition) AS partition,
            max(r.xid) AS xid
           FROM reference r
          GROUP BY r.lane_id, r.destination, r.stream_seq
        )
 SELECT COALESCE(e.message_id, o.message_id, b.message_id, d.message_id) AS message_id,
    m.destination,
    COALESCE(e.stream_id, o.stream_id, b.stream_id, d.stream_id) AS stream_id,
    m.stream_seq,
    m.version,
    m.partition,
    COALESCE(e.type_name, o.type_name, b.type_name, d.type_name) AS type_name,
    COALESCE(e.stored_at, o.stored_at, b.stored_at, d.stored_at) AS stored_at,
    (((1 |
        CASE
            WHEN (m.version > 0) THEN 2
            ELSE 0
        END) |
        CASE
            WHEN ((d.lane_id IS NULL) AND (b.lane_id IS NULL) AND (h.decided OR pg_visible_in_snapshot(((m.xid)::text)::xid8, w.base) OR pg_visible_in_snapshot(((m.xid)::text)::xid8, w.cursor))) THEN 4
            ELSE 0
        END) |
        CASE
            WHEN ((d.lane_id IS NOT NULL) OR (k.attempts > 0)) THEN 32768
            ELSE 0
        END) AS status,
    COALESCE(d.attempts, k.attempts, 0) AS attempts,
    COALESCE(d.reason, k.reason, (0)::smallint) AS reason,
    COALESCE(d.error, k.error, ''::text) AS error,
        CASE
            WHEN (d.lane_id IS NULL) THEN k.due
            ELSE NULL::timestamp with time zone
        END AS due,
    d.dead_at
   FROM (((((((message m
     LEFT JOIN corelane.wh_resolved w ON ((w.partition = m.partition)))
     LEFT JOIN corelane.wh_dead_letter d ON (((d.lane_id = m.lane_id) AND (d.destination = m.destination) AND (d.stream_seq = m.stream_seq))))
     LEFT JOIN corelane.wh_parked_reference b ON (((b.lane_id = m.lane_id) AND (b.destination = m.destination) AND (b.stream_seq = m.stream_seq))))
     LEFT JOIN corelane.wh_parked k ON (((k.lane_id = m.lane_id) AND (k.destination = m.destination) AND (k.stream_seq = m.stream_seq))))
     LEFT JOIN corelane.wh_handed_out h ON (((h.incarnation = w.owner) AND (h.lane_id = m.lane_id) AND (h.destination = m.destination) AND (h.stream_seq = m.stream_seq) AND (NOT h.beside) AND h.decided)))
     LEFT JOIN corelane.wh_event_store e ON (((m.version > 0) AND (e.stream_id = m.lane_id) AND (e.version = m.version))))
     LEFT JOIN corelane.wh_outbox o ON (((m.version = 0) AND (o.lane_id = m.lane_id) AND (o.stream_seq = m.stream_seq))));

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

CREATE SEQUENCE corelane.wh_position
    START WITH 1
    INCREMENT BY 4096
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE corelane.wh_replay (
    replayed_to bigint DEFAULT 0 NOT NULL,
    events bigint DEFAULT 0 NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    replay_id uuid NOT NULL,
    destination text NOT NULL,
    filter jsonb NOT NULL
);

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

CREATE TABLE corelane.wh_subscription (
    started_at bigint NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    subscription integer NOT NULL,
    name text NOT NULL,
    CONSTRAINT wh_subscription_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 255)))
);

CREATE TABLE corelane.wh_subscription_member (
    joined_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    subscription integer NOT NULL,
    incarnation integer NOT NULL
);

CREATE TABLE corelane.wh_subscription_partition (
    fence bigint DEFAULT 0 NOT NULL,
    floor bigint DEFAULT 0 NOT NULL,
    target_floor bigint DEFAULT 0 NOT NULL,
    "position" bigint DEFAULT 0 NOT NULL,
    before_from bigint DEFAULT 0 NOT NULL,
    before_position bigint DEFAULT 0 NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    subscription integer NOT NULL,
    partition integer NOT NULL,
    owner integer,
    before_is_foreign boolean DEFAULT false NOT NULL,
    resolved pg_snapshot DEFAULT '1:1:'::pg_snapshot NOT NULL,
    target pg_snapshot,
    before_resolved pg_snapshot DEFAULT '1:1:'::pg_snapshot NOT NULL,
    before_target pg_snapshot
)
WITH (fillfactor='50');

ALTER TABLE corelane.wh_subscription ALTER COLUMN subscription ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME corelane.wh_subscription_subscription_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE corelane.wh_tombstone (
    first_version bigint NOT NULL,
    events bigint NOT NULL,
    truncated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    stream_id uuid NOT NULL,
    note text DEFAULT ''::text NOT NULL,
    CONSTRAINT wh_tombstone_first_version_check CHECK ((first_version > 1)),
    CONSTRAINT wh_tombstone_note_check CHECK ((octet_length(note) <= 1024))
);

CREATE TABLE corelane.wh_worker_watch (
    counter bigint NOT NULL,
    watched_ms bigint DEFAULT 0 NOT NULL,
    looked_at timestamp with time zone NOT NULL,
    incarnation integer NOT NULL,
    watched integer NOT NULL
);

ALTER TABLE ONLY corelane.wh_inbox_seen ATTACH PARTITION corelane.wh_inbox_seen_misdated FOR VALUES IN ('-2');

ALTER TABLE ONLY corelane.wh_inbox_seen ATTACH PARTITION corelane.wh_inbox_seen_other DEFAULT;

ALTER TABLE ONLY corelane.wh_inbox_seen ATTACH PARTITION corelane.wh_inbox_seen_timeless FOR VALUES IN ('-1');

ALTER TABLE ONLY corelane.wh_log ATTACH PARTITION corelane.wh_log_0 FOR VALUES IN ('0');

ALTER TABLE ONLY corelane.wh_log ATTACH PARTITION corelane.wh_log_1 FOR VALUES IN ('1');

ALTER TABLE ONLY corelane.wh_log ATTACH PARTITION corelane.wh_log_2 FOR VALUES IN ('2');

ALTER TABLE ONLY corelane.wh_outbox ATTACH PARTITION corelane.wh_outbox_0 FOR VALUES IN ('0');

ALTER TABLE ONLY corelane.wh_outbox ATTACH PARTITION corelane.wh_outbox_1 FOR VALUES IN ('1');

ALTER TABLE ONLY corelane.wh_outbox ATTACH PARTITION corelane.wh_outbox_2 FOR VALUES IN ('2');

ALTER TABLE ONLY corelane.wh_consumer
    ADD CONSTRAINT wh_consumer_name_key UNIQUE (name);

ALTER TABLE ONLY corelane.wh_consumer
    ADD CONSTRAINT wh_consumer_pkey PRIMARY KEY (consumer);

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

ALTER TABLE ONLY corelane.wh_handed_out
    ADD CONSTRAINT wh_handed_out_pkey PRIMARY KEY (incarnation, lane_id, destination, stream_seq, beside);

ALTER TABLE ONLY corelane.wh_inbox_dead_letter
    ADD CONSTRAINT wh_inbox_dead_letter_consumer_message_id_key UNIQUE (consumer, message_id);

ALTER TABLE ONLY corelane.wh_inbox_dead_letter
    ADD CONSTRAINT wh_inbox_dead_letter_pkey PRIMARY KEY (dead_letter_id);

ALTER TABLE ONLY corelane.wh_inbox_parked
    ADD CONSTRAINT wh_inbox_parked_pkey PRIMARY KEY (consumer, lane_id);

ALTER TABLE ONLY corelane.wh_inbox_part
    ADD CONSTRAINT wh_inbox_part_pkey PRIMARY KEY (day);

ALTER TABLE ONLY corelane.wh_inbox
    ADD CONSTRAINT wh_inbox_pkey PRIMARY KEY (consumer, message_id);

ALTER TABLE ONLY corelane.wh_inbox_seen
    ADD CONSTRAINT wh_inbox_seen_pkey PRIMARY KEY (message_id, consumer, day);

ALTER TABLE ONLY corelane.wh_inbox_seen_misdated
    ADD CONSTRAINT wh_inbox_seen_misdated_pkey PRIMARY KEY (message_id, consumer, day);

ALTER TABLE ONLY corelane.wh_inbox_seen_other
    ADD CONSTRAINT wh_inbox_seen_other_pkey PRIMARY KEY (message_id, consumer, day);

ALTER TABLE ONLY corelane.wh_inbox_seen_timeless
    ADD CONSTRAINT wh_inbox_seen_timeless_pkey PRIMARY KEY (message_id, consumer, day);

ALTER TABLE ONLY corelane.wh_inspection
    ADD CONSTRAINT wh_inspection_pkey PRIMARY KEY (only_row);

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

ALTER TABLE ONLY corelane.wh_replay
    ADD CONSTRAINT wh_replay_pkey PRIMARY KEY (replay_id);

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

ALTER TABLE ONLY corelane.wh_subscription_member
    ADD CONSTRAINT wh_subscription_member_pkey PRIMARY KEY (subscription, incarnation);

ALTER TABLE ONLY corelane.wh_subscription
    ADD CONSTRAINT wh_subscription_name_key UNIQUE (name);

ALTER TABLE ONLY corelane.wh_subscription_partition
    ADD CONSTRAINT wh_subscription_partition_pkey PRIMARY KEY (subscription, partition);

ALTER TABLE ONLY corelane.wh_subscription
    ADD CONSTRAINT wh_subscription_pkey PRIMARY KEY (subscription);

ALTER TABLE ONLY corelane.wh_tombstone
    ADD CONSTRAINT wh_tombstone_pkey PRIMARY KEY (stream_id);

ALTER TABLE ONLY corelane.wh_worker_watch
    ADD CONSTRAINT wh_worker_watch_pkey PRIMARY KEY (incarnation, watched);

CREATE INDEX wh_event_store_position ON corelane.wh_event_store USING brin ("position") WITH (pages_per_range='32', autosummarize='on');

CREATE INDEX wh_event_store_xid ON corelane.wh_event_store USING brin (xid) WITH (pages_per_range='32', autosummarize='on');

CREATE INDEX wh_handed_out_message ON corelane.wh_handed_out USING btree (incarnation, message_id);

CREATE INDEX wh_inbox_lane ON corelane.wh_inbox USING btree (consumer, lane_id, arrival);

CREATE INDEX wh_inbox_parked_due ON corelane.wh_inbox_parked USING btree (consumer, due) WHERE (due < 'infinity'::timestamp with time zone);

CREATE INDEX wh_inbox_seen_misdated_age ON corelane.wh_inbox_seen_misdated USING btree (received_at);

CREATE INDEX wh_inbox_seen_received ON ONLY corelane.wh_inbox_seen USING brin (received_at) WITH (pages_per_range='64', autosummarize='on');

CREATE INDEX wh_inbox_seen_misdated_received_at_idx ON corelane.wh_inbox_seen_misdated USING brin (received_at) WITH (pages_per_range='64', autosummarize='on');

CREATE INDEX wh_inbox_seen_other_age ON corelane.wh_inbox_seen_other USING btree (received_at);

CREATE INDEX wh_inbox_seen_other_received_at_idx ON corelane.wh_inbox_seen_other USING brin (received_at) WITH (pages_per_range='64', autosummarize='on');

CREATE INDEX wh_inbox_seen_timeless_received_at_idx ON corelane.wh_inbox_seen_timeless USING brin (received_at) WITH (pages_per_range='64', autosummarize='on');

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

CREATE INDEX wh_parked_due ON corelane.wh_parked USING btree (due);

CREATE INDEX wh_parked_partition ON corelane.wh_parked USING btree (partition);

CREATE INDEX wh_scheduled_due ON corelane.wh_scheduled USING btree (due);

ALTER INDEX corelane.wh_inbox_seen_pkey ATTACH PARTITION corelane.wh_inbox_seen_misdated_pkey;

ALTER INDEX corelane.wh_inbox_seen_received ATTACH PARTITION corelane.wh_inbox_seen_misdated_received_at_idx;

ALTER INDEX corelane.wh_inbox_seen_pkey ATTACH PARTITION corelane.wh_inbox_seen_other_pkey;

ALTER INDEX corelane.wh_inbox_seen_received ATTACH PARTITION corelane.wh_inbox_seen_other_received_at_idx;

ALTER INDEX corelane.wh_inbox_seen_pkey ATTACH PARTITION corelane.wh_inbox_seen_timeless_pkey;

ALTER INDEX corelane.wh_inbox_seen_received ATTACH PARTITION corelane.wh_inbox_seen_timeless_received_at_idx;

ALTER TABLE ONLY corelane.wh_partition
    ADD CONSTRAINT wh_partition_owner_fkey FOREIGN KEY (owner) REFERENCES corelane.wh_instance(number);

ALTER TABLE ONLY corelane.wh_subscription_member
    ADD CONSTRAINT wh_subscription_member_subscription_fkey FOREIGN KEY (subscription) REFERENCES corelane.wh_subscription(subscription) ON DELETE CASCADE;

ALTER TABLE ONLY corelane.wh_subscription_partition
    ADD CONSTRAINT wh_subscription_partition_subscription_fkey FOREIGN KEY (subscription) REFERENCES corelane.wh_subscription(subscription) ON DELETE CASCADE;
