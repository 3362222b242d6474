-- claim_inbox: kept messages of lanes that are due, for another try: locks the lanes for this session.
-- in: p_consumer; p_partitions: of lanes (null: all); p_held_lanes: lanes that this session has locked already: they are
--     left out; p_lanes_max (1 to 10,000); p_rows_max and p_bytes_max (of payloads and metadata): as many rows at most,
--     but always one
-- out: a row a message, lane after lane, in each in the order of arrival. attempts: of this message so far (0: not tried
--     since it came behind another one); more: something further may be due
-- in turn: the lanes that are due longest are tried first. Those in other sessions' hands are passed over, so that they hold
--     back no lane behind them. A call looks at 100 * p_lanes_max lanes at most; if it comes so far, this session's next call
--     goes on behind them (its setting corelane.claimed_to)
-- afterwards: the lanes of the rows are locked by this session, and no others. A lane of which nothing is kept is freed
-- errors: 22023 at REPEATABLE READ or SERIALIZABLE. After any error close the connection, as after begin_inbox
-- locks: lanes (session locks, by trying)
-- cost: a row and a try a due lane, until p_lanes_max are locked or 100 times as many were looked at; p_rows_max bodies,
--     however long the lanes are
create or replace function @schema@.claim_inbox(
    p_consumer int2, p_partitions int4[] default null, p_held_lanes uuid[] default '{}', p_lanes_max int4 default 100,
    p_rows_max int4 default 200, p_bytes_max int8 default 8388608)
returns table (
    lane_id uuid, message_id uuid, stream_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8,
    trace_flags int2, received_at timestamptz, attempts int4, source text, type_name text, content_type text,
    metadata bytea, payload bytea, more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
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
