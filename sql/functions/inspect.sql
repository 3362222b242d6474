-- inspect: looks for what waits longer than it should, and deletes dead letters whose time is over. Every instance's keeper
-- calls it once a minute; one of them does it, always the same while it does: nobody is told that it leads, it is found here.
-- in: p_incarnation: who calls; p_dead_letters_days: dead letters that are older go (0: none ever goes);
--     p_unpublished_ms, p_stuck_ms: see wh_sentinel
-- out: inspected (false: it is another one's turn); dead_letters_trimmed; the rest as wh_sentinel
-- whose turn: the one's that did it last. Another's if that one is not alive, or has not come to the end of an inspection
--     for 150 s: an instance that never calls (a worker that speaks SQL, an older program) is in nobody's way
-- keeps: a dead letter that holds its stream stays, however old it is
-- locks: inspections (one at a time, by trying); the dead letters that go (those that an operator has in hand stay: he
--     may wait for an owner that waits for what is deleted here)
-- time: run it with a statement_timeout of about a second
-- cost: see wh_sentinel; at most 1,000 dead letters, among the 10,000 oldest
create or replace function @schema@.inspect(
    p_incarnation int4, p_dead_letters_days int4, p_unpublished_ms int8, p_stuck_ms int8, out inspected bool,
    out dead_letters_trimmed int4, out unpublished int4, out unpublished_age_ms int8, out overdue int4, out stuck int4,
    out stuck_age_ms int8, out held int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
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
