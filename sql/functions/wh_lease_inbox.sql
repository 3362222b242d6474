-- wh_lease_inbox: lanes of a consumer that are due, into the hands of a worker without a session, until its lease is over.
-- in: see process_inbox_batch    out: messages, lane after lane, in each in the order of arrival; more: further ones may
--     be due
-- excludes: `due` ends with the lease, so nobody else claims the lane before; a session that handles it holds its lock
-- locks: lanes (to the end of the transaction, by trying); rows of wh_inbox_parked, by trying: behind those that the call
--     has taken so far it waits for none. A lane in which an operator gives something back comes with a later call
-- cost: a row and a try a due lane, a hundred times p_max_lanes (or a thousand) at most, past those in others' hands; a probe a message, an update a lane
create or replace function @schema@.wh_lease_inbox(
    p_worker uuid, p_consumer int2, p_lease interval, p_max_lanes int4, p_max_rows int4, p_max_bytes int8,
    out messages uuid[], out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
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
