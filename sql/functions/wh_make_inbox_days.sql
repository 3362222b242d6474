-- wh_make_inbox_days: makes the parts of wh_inbox_seen for today and the days ahead that are missing.
-- in: p_days_ahead: 1 to 366    out: made; skipped: days of which the default part holds ids already: they stay there, and
--     the day gets no part, since the same id must always meet the same part
-- runs as the tables' owner, because it makes tables: it takes nothing but the count
-- errors: none for a lock that is not to be had within 50 ms: the rest comes with the next call
-- locks: maintenance (key 3, by trying) while there is something to make; then wh_inbox_seen (SHARE UPDATE EXCLUSIVE) and
--     its default part (ACCESS EXCLUSIVE: it is read for ids of the day), each for at most 50 ms of waiting
-- cost: one probe when nothing is missing; else the default part is read once a day that is made: it holds ids of the days
--     for which nobody has made a part in time, and no others (wh_inbox_place)
create or replace function @schema@.wh_make_inbox_days(p_days_ahead int4, out made int4, out skipped int4)
language plpgsql volatile security definer
set search_path = @schema@, pg_temp
as $$
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
$$;
revoke execute on function @schema@.wh_make_inbox_days(int4) from public;
