-- maintain_inbox: one bounded step of the inbox's memory: parts for the days ahead, and forgetting of those whose window is
-- over. Every instance may call it, every few seconds, and at once again while it answers `more`.
--
--     select * from maintain_inbox(interval '30 days')
--
-- in: p_window: how long an id is remembered after its receipt, at least an hour; p_days_ahead: 1 to 366
-- out: made and skipped: see wh_make_inbox_days; truncated, dropped: days forgotten; blocked: a day could have gone, but
--     somebody had it locked: the next call tries again; more: this step got on: the next can too
-- forgets: ids that stand with no day (misdated, other) one by one when their own window is over, 1,000 a step; of ids
--     without a time (timeless) none. A day goes when its newest receipt is older than the window. Where its
--     parent can be locked at once the part is dropped; else it is made empty, which locks it alone, and dropped later
-- runs as the tables' owner, because it drops tables
-- locks: days of the inbox (one at a time, by trying), then what wh_make_inbox_days says; to forget: wh_inbox_seen, its
--     default part and the day's (ACCESS EXCLUSIVE, without waiting), else the day's alone. Under the lock it is looked
--     again
-- time: run it with a statement_timeout: what earlier calls have done is kept, and index entries that an interrupted call
--     has made are
-- cost: a few probes when there is nothing to do; else about 50 ms of reading, or the removal of one file
create or replace function @schema@.maintain_inbox(
    p_window interval, p_days_ahead int4 default 3, out made int4, out skipped int4, out truncated int4, out dropped int4,
    out blocked bool, out more bool)
language plpgsql volatile security definer
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
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
$$;
revoke execute on function @schema@.maintain_inbox(interval, int4) from public;
