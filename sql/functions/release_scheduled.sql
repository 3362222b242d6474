-- release_scheduled: gives due messages their numbers and puts them into the outbox and the log, from where they are
-- claimed like anybody else's. A scheduled message has no number before: what is stored meanwhile goes first.
-- in: p_incarnation: who asks, alive; p_partitions: whose messages; p_rows_max: at most so many
-- out: how many were released; 0 too if those due belong to streams that are locked elsewhere
-- locks: fence of the incarnation (shared); then a partition (shared) with at most 20 ms of waiting, ten times at
--     most, and at most 256 streams (exclusive) by trying: what cannot be had stays for the next call. So a user's
--     long transaction delays its own streams only. Rows: those not taken by another at this moment
-- order: within a stream by due time, then as they were stored
-- doubles: a message without stream whose id is stored already, or is released here before it, goes to the dead
--     letters, every copy for itself: it never gets a number, so the key there is its scheduled_id, below zero. The
--     others are released. (Of a double that goes nowhere nothing is kept: the message of its id is.)
-- cost: the rows released
create or replace function @schema@.release_scheduled(p_incarnation int4, p_partitions int4[], p_rows_max int4)
returns int4
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
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
