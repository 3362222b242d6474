-- wh_decide_inbox: what a worker without a session has handled, what failed, and what it still has in hand.
-- in: see process_inbox_batch    out: completed; failed (dead ones included); unknown (failures and renewals that name
--     nothing of this worker's)
-- errors: CL040 if a completion names nothing of this worker's: its effects must not stay; 22023 as wh_fail_work
-- locks: lanes (to the end of the transaction, by trying); rows of wh_inbox_parked, by ascending lane; as finish_inbox,
--     park_inbox and bury_inbox
-- cost: a probe or two a message, an update a lane
create or replace function @schema@.wh_decide_inbox(
    p_worker uuid, p_consumer int2, p_completions uuid[], p_failures uuid[], p_reasons int4[], p_errors text[],
    p_renewals uuid[], p_lease interval, p_attempts_max int4, p_base_ms int8, p_cap_ms int8, p_hold bool,
    out completed int4, out failed int4, out unknown int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
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
