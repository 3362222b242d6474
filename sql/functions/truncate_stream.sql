-- truncate_stream: deletes a stream's events before a version, for good. Whoever reads from below is told where it begins.
--
--     -- archive first: everything below version 900 is read out and stored elsewhere; then
--     select * from corelane.truncate_stream('018f…aa', 900, 's3://archive/018f…aa', p_dry_run => false);
--
-- in: p_stream_id; p_before: the first version that is kept, at most the newest event's; p_note: where the archive is, up
--     to 1 KiB, told to readers (null: as it was); p_rows_max: at most so many events at once (1 to 10,000): call it until
--     `more` is false, each call a transaction of its own; p_dry_run: only count, then all of them
-- out: first_version (the first that is kept, or would be); matched (looked at); truncated (0 if only counted); of those
--     looked at, what is not published for the first time yet, as far as the cursors say (waiting), and dead letters
--     (dead): the first of either is kept, and all behind it; more (the next call gets on)
-- stays: the newest event, because it carries the stream's numbers: appends, and what they expect, go on as before.
--     erase_events empties it
-- errors: 22023 beyond the newest event, or where there is none
-- runs as the tables' owner; EXECUTE is an operator's (see `corelane migrate --grant-operator-to`)
-- locks: truncations (one at a time, waiting)    cost: a probe and a deletion an event; vacuum has the rest to do
create or replace function @schema@.truncate_stream(
    p_stream_id uuid, p_before int8, p_note text default null, p_rows_max int4 default 1000, p_dry_run bool default true,
    out first_version int8, out matched int8, out truncated int8, out waiting int8, out dead int8, out more bool)
language plpgsql volatile security definer
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_last record;
    v_first int8;
    v_to int8;
    v_stop int8;
    v_rebased int8;
    v_is_unsettled bool := false;
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    perform wh_require('bytes of p_note', octet_length(coalesce(p_note, '')), 0, 1024);
    if not p_dry_run then
        perform pg_advisory_xact_lock(wh_lock_class(6), 4);
    end if;

    -- Later statements than the lock.
    select e.version, e.partition into v_last
    from wh_event_store e where e.stream_id = p_stream_id order by e.version desc limit 1;
    if p_before is null or p_before > coalesce(v_last.version, 0) then
        raise exception 'p_before = %: stream % is at version %, and its newest event stays', p_before, p_stream_id,
            coalesce(v_last.version, 0) using errcode = '22023', hint = 'erase_events empties it.';
    end if;
    v_first := coalesce((select t.first_version from wh_tombstone t where t.stream_id = p_stream_id), 1);
    v_to := case when p_dry_run then p_before else least(p_before, v_first + p_rows_max) end;

    -- As replay_events: ids of what was stored before a rebase mean nothing, the log says what of it is not published.
    select i.rebased_position into strict v_rebased from wh_installation i;
    if v_rebased > 0 then
        v_is_unsettled := exists (
            select from wh_log l
            join wh_resolved r on r.partition = v_last.partition
            where l.position <= v_rebased and v_last.partition = any (l.partition)
                and not pg_visible_in_snapshot(l.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(l.xid::text::xid8, r.cursor));
    end if;
    with resolved as materialized (
        select r.base, r.cursor from wh_resolved r where r.partition = v_last.partition
    ), judged as (
        select e.version,
            case when e.position <= v_rebased then v_is_unsettled
                else not (pg_visible_in_snapshot(e.xid::text::xid8, r.base)
                    or pg_visible_in_snapshot(e.xid::text::xid8, r.cursor)) end
            or e.stream_seq in (
                select k.stream_seq from wh_parked_reference k where k.lane_id = p_stream_id and k.version > 0)
                as is_waiting,
            e.stream_seq in (
                select d.stream_seq from wh_dead_letter d where d.lane_id = p_stream_id and d.version > 0) as is_dead
        from wh_event_store e
        cross join resolved r
        where e.stream_id = p_stream_id and e.version >= v_first and e.version < v_to
    )
    select count(*), count(*) filter (where j.is_waiting), count(*) filter (where j.is_dead),
        coalesce(min(j.version) filter (where j.is_waiting or j.is_dead), greatest(v_to, v_first))
    into matched, waiting, dead, v_stop
    from judged j;
    first_version := v_stop;
    truncated := 0;
    more := not p_dry_run and v_stop > v_first and v_stop = v_to and v_to < p_before;
    if p_dry_run or v_stop <= v_first then
        return;
    end if;

    delete from wh_event_store e where e.stream_id = p_stream_id and e.version < v_stop;
    get diagnostics truncated = row_count;
    insert into wh_tombstone as t (first_version, events, stream_id, note)
    values (v_stop, truncated, p_stream_id, coalesce(p_note, ''))
    on conflict (stream_id) do update
    set first_version = excluded.first_version, events = t.events + excluded.events,
        truncated_at = excluded.truncated_at, note = coalesce(p_note, t.note);
end
$$;
revoke execute on function @schema@.truncate_stream(uuid, int8, text, int4, bool) from public;
