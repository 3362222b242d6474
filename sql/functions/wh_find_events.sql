-- wh_find_events: where the next events behind a place stand, and those below it that have come late: what read_subscription
-- and read_feed choose their pages from.
-- in: p_after: up to here the snapshot that is being read has been; p_low (at least p_after): from here on by position,
--     below only of p_late; p_started: nothing at or below is of interest; p_ceiling: the last position of interest;
--     p_window: how many positions to begin with (null: not known); p_late: transactions that have come late (null: none);
--     p_rows_max: events of a page
-- out: places: of every event in ("low", window_end], and of p_late's in (p_after, "low"], and maybe of others; low: p_low,
--     or lower where those of p_late are too many; window_end: the positions end here; scanned: events of the window
-- stable: what it has found stands there in the statement that calls it, and in no later one
-- locks: none    cost: windows of positions, over BRIN, of about eight times p_rows_max events at most; transactions of
--     about the same time in one scan, over BRIN
create or replace function @schema@.wh_find_events(
    p_after int8, p_low int8, p_started int8, p_ceiling int8, p_window int8, p_late int8[], p_rows_max int4,
    out places tid[], out low int8, out window_end int8, out scanned int8)
language plpgsql stable
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    v_scan_max int8 := 8 * p_rows_max::int8;
    v_window tid[];
begin
    low := p_low;
    if p_late is not null and low > p_after then
        -- Those of about the same time in one scan.
        places := array(
            select e.ctid
            from (
                select min(x.xid) as first_xid, max(x.xid) as last_xid
                from (
                    select x.xid, count(*) filter (where x.is_far) over (order by x.xid) as island
                    from (
                        select x as xid, x - lag(x) over (order by x) > 100 as is_far from unnest(p_late) x
                    ) x
                ) x
                group by x.island
            ) x
            cross join lateral (
                select e.ctid
                from wh_event_store e
                where e.xid >= x.first_xid and e.xid <= x.last_xid and e.xid = any (p_late)
                    and e.position + 0 > p_after and e.position + 0 <= p_low
                limit v_scan_max + 1
            ) e
            limit v_scan_max + 1);
        if cardinality(places) > v_scan_max then
            -- A large one: walk by position from where it began.
            low := greatest(p_after, p_started);
            places := null;
        end if;
    end if;

    window_end := least(p_ceiling, low + coalesce(p_window, p_ceiling));
    scanned := 0;
    -- Nothing was drawn since: only what has come late is of interest.
    while window_end > low loop
        -- All of a window that is not made smaller: 4,096 positions have no more rows than that.
        v_window := array(
            select e.ctid from wh_event_store e where e.position > low and e.position <= window_end
            limit greatest(v_scan_max, 4096) + 1);
        scanned := cardinality(v_window);
        exit when scanned <= v_scan_max or window_end - low <= 4096;
        window_end := low + greatest((window_end - low) / 8, 4096);
    end loop;
    places := v_window || places;
end
$$;
