-- begin_inbox: before deliveries are handled: locks their lanes for this session, and says what each of them is.
--
--     select begin_inbox(1::int2, array[m1, m2, m3], array[lane1, lane1, lane2], p_unlock_lanes => array[lane0])
--
-- in: p_consumer; p_message_ids and p_lane_ids, an element a delivery, in the order of arrival (the lane of a message
--     without stream: wh_lane); p_held_lanes: lanes that this session has locked already, and keeps;
--     p_unlock_lanes: lanes that it gives back, first of all; p_days: wh_inbox_day of each id, from a caller that knows
--     the rule (-1 for an id without time). Another value would not find what is remembered
-- out: an element a delivery, in input order: 0 new: handle it; 1 duplicate: decided before, or the same id stands
--     before it in this call: settle it; 2 busy: another session handles its lane: try again later; 3 behind: its lane is
--     parked, keep it behind (keep_inbox)
-- afterwards: the lanes of the elements that are 0 or 3 are locked by this session, and no other lane is beyond
--     p_held_lanes. A lane is locked once, whatever the number of its elements
-- errors: 22023 for arrays of unlike length or null elements, and at REPEATABLE READ or SERIALIZABLE: what was decided
--     before the lock would not be seen. After any error close the connection: locks of a session outlive it
-- locks: lanes (session locks, by trying; nothing is waited for)
-- cost: a lock a lane; a statement a day of the ids; a probe an id (two while there are misdated ids); a probe a lane while something of the consumer is
--     parked. 100 ids of 100 lanes, all new: 3 µs an id with p_days, 6 without
-- Without p_days: beside that one a call with defaults would be ambiguous.
drop function if exists @schema@.begin_inbox(int2, uuid[], uuid[], uuid[], uuid[]);
create or replace function @schema@.begin_inbox(
    p_consumer int2, p_message_ids uuid[], p_lane_ids uuid[], p_held_lanes uuid[] default '{}',
    p_unlock_lanes uuid[] default '{}', p_days int4[] default null)
returns int2[]
language plpgsql volatile
set enable_seqscan = off
set jit = off
as $$
declare
    v_count constant int4 := cardinality(p_message_ids);
    v_class constant int4 := @schema@.wh_lock_class(0);
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
        perform pg_advisory_unlock(v_class, @schema@.wh_inbox_key(p_consumer, l)) from unnest(p_unlock_lanes) l;
    end if;
    if v_count = 0 then
        return '{}';
    end if;
    v_wanted := array(select distinct l from unnest(p_lane_ids) l);
    if cardinality(p_held_lanes) > 0 then
        v_wanted := array(select l from unnest(v_wanted) l except select h from unnest(p_held_lanes) h);
    end if;
    v_locked := array(
        select l from unnest(v_wanted) l where pg_try_advisory_lock(v_class, @schema@.wh_inbox_key(p_consumer, l)));

    -- Later statements than the locks: who had them before has committed. A day a statement: so each reads one part
    -- alone, which for an id by itself costs three times as much.
    if v_days is null then
        v_days := array(
            select @schema@.wh_inbox_day(g.id) from unnest(p_message_ids) with ordinality g(id, turn) order by g.turn);
    end if;
    v_day := v_days[1];
    if v_day = all (v_days) then
        v_seen := array(
            select s.message_id from @schema@.wh_inbox_seen s
            where s.day = v_day and s.consumer = p_consumer and s.message_id = any (p_message_ids));
    else
        v_seen := '{}';
        for v_day, v_ids in
            select g.day, array_agg(g.id) from unnest(p_message_ids, v_days) g(id, day) group by 1
        loop
            v_seen := v_seen || array(
                select s.message_id from @schema@.wh_inbox_seen s
                where s.day = v_day and s.consumer = p_consumer and s.message_id = any (v_ids));
        end loop;
    end if;
    -- One that came before its time, or long after it, stands apart from its day.
    if exists (select from @schema@.wh_inbox_seen s where s.day = -2) then
        v_seen := v_seen || array(
            select s.message_id from @schema@.wh_inbox_seen s
            where s.day = -2 and s.consumer = p_consumer and s.message_id = any (p_message_ids));
    end if;
    if exists (select from @schema@.wh_inbox_parked k where k.consumer = p_consumer) then
        v_parked := array(
            select k.lane_id from @schema@.wh_inbox_parked k
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
        perform pg_advisory_unlock(v_class, @schema@.wh_inbox_key(p_consumer, l.lane_id))
        from (
            select l from unnest(v_locked) l
            except
            select s.lane_id from unnest(p_lane_ids, v_states) s(lane_id, state) where s.state in (0, 3)
        ) l(lane_id);
    end if;
    return v_states;
end
$$;
