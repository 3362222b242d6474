-- replay_events: publishes events of the event store once more to a destination, each marked as a copy that was asked for.
-- in: p_destination: where to: the one that had them, or any other
--     what is meant, at least one of: p_streams (at most 1,000; then also p_version_from, p_version_to),
--         p_position_from, p_position_to, p_type (a name, or what it begins with and `*`), p_stored_from,
--         p_stored_before, or p_all; null is any
--     p_replay: which replay this call goes on with, or begins; null: a new one, whose id is answered
--     p_rows_max: at most so many at once (1 to 10,000): call it with the answered id until `more` is false, each call
--         a transaction of its own. p_after: only events behind this position (for the pages of a dry run)
--     p_dry_run: only count
-- out: replay_id (null: nothing was done); matched; replayed (0 if only counted); waiting (left alone: not published for
--     the first time yet, as far as the cursors say; they come by themselves); dead (left alone: dead letters of this
--     destination, see retry_dead_letters); lanes (streams that get copies); last_position (looked at so far); more
--     (there may be further ones behind it)
-- how: copies stand beside the log, in lanes that a replay has for itself: one a stream, so they come in the stream's
--     order, under their own ids, numbers and versions. The stream's own lane, its cursor and its attempts are left
--     alone: new events do not wait for copies, nor copies for them. A copy that fails is tried again and dies as any
--     message does, and holds up its own stream of this replay only
-- once: a call that is repeated with its p_replay after a lost answer goes on behind what was done. The copies go out at
--     least once
-- bounded: one call looks at some 100,000 events, and answers `more` though it has found few
-- takes hold: at once where the owner lives (it reads of it in the log, see wh_tell_lanes), else with the next owner
-- errors: 22023 as wh_match_events, without a destination, or if a replay goes on with another filter than it began
--     with; 55000 while a program of schema version 1 runs, which would take a copy's lane for its stream; as
--     wh_lock_owners
-- locks: the replay's row; fences of the owners (exclusive, see wh_lock_owners); rows of wh_parked
-- cost: as wh_match_events; a probe or two and a copy of the body an event
create or replace function @schema@.replay_events(
    p_destination text, p_replay uuid default null, p_all bool default false, p_streams uuid[] default null,
    p_version_from int8 default null, p_version_to int8 default null, p_position_from int8 default null,
    p_position_to int8 default null, p_type text default null, p_stored_from timestamptz default null,
    p_stored_before timestamptz default null, p_after int8 default 0, p_rows_max int4 default 1000,
    p_dry_run bool default true,
    out replay_id uuid, out matched int4, out replayed int4, out waiting int4, out dead int4, out lanes int4,
    out last_position int8, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_custom_plan
as $$
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
