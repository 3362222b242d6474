-- remember_inbox: writes down that messages are decided, in the transaction of what was decided. First of all in it: only
-- who is new here may leave effects.
-- in: p_consumer; p_message_ids; p_days: as in begin_inbox
-- out: whether it is new, an element an id, in input order; of the same id the first
-- where: with the day of the id's own time, if that is near or has a part; else among the misdated, since ids come from
--     strangers (wh_inbox_place). Both are looked at for every id: one that came before its time is known when that comes
-- errors: 23502 for a null
-- waits: for another transaction that remembers the same id and has not ended: one that handles lanes under their locks
--     (begin_inbox) meets none but forged copies
-- locks: wh_inbox_seen (ROW EXCLUSIVE, which keeps days from being dropped); for ids of a day without a part its default
--     part too (ROW EXCLUSIVE, which keeps the day's part from being made); the rows it inserts, by ascending id, so that
--     two calls cannot wait for each other
-- cost: one statement, a row of 50 bytes and an index entry an id (4 µs with p_days, 7 without); while there are misdated
--     ids a probe more
-- As in begin_inbox.
drop function if exists @schema@.remember_inbox(int2, uuid[]);
create or replace function @schema@.remember_inbox(p_consumer int2, p_message_ids uuid[], p_days int4[] default null)
returns bool[]
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
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
