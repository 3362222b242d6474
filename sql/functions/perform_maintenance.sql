-- perform_maintenance: one bounded step of rotation and trimming. Every instance's keeper calls it: every 5 s while
-- something stands in the log, each minute when nothing did and nobody has stored since, and at once again while it
-- gets on (`more`); more often does no harm.
-- in: p_incarnation: who does it
-- out: truncated (segments emptied), rotated (writers go to the next segment), blocked_by (pid of one that holds a
--     segment: a dump, an open enlisted transaction), cursors_trimmed, work_left (something stands in the log: come
--     again soon; otherwise there is nothing to do until somebody stores), more (this step got on: the next can too)
-- a segment's way: it is current; writers are switched to the next; its references are found resolved, its newest
--     flushes are noted and its numbers are carried to wh_stream (in steps, without a lock, each its own transaction);
--     it is truncated. Nothing relies on which segment is current: a writer with an old snapshot may still write to
--     the one before.
-- locks: maintenance (one at a time, by trying); lock_timeout 1 s for rows; see wh_truncate_segment
-- time: run it with a statement_timeout of about a second; what earlier steps have done is kept
-- cost: a few probes when there is nothing to do; else a page of what wh_check_resolved, wh_note_flushes and
--     wh_carry_numbers say, and at most 1,000 cursors, 100 ended instances (a day after their end), 2,000 notes of
--     flushes and 2,000 of workers that are gone (among what all workers have in hand)
create or replace function @schema@.perform_maintenance(
    p_incarnation int4, out truncated int4, out rotated bool, out blocked_by int4, out cursors_trimmed int4,
    out work_left bool, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
declare
    v_current int2;
    v_switched_at timestamptz;
    v_segment int2;
    v_rotation wh_rotation;
    v_done bool;
    v_filled bool;
    v_bytes int8;
begin
    truncated := 0;
    rotated := false;
    cursors_trimmed := 0;
    work_left := false;
    more := false;
    if not pg_try_advisory_xact_lock(wh_lock_class(6), 0)
        or not exists (select from wh_instance i where i.number = p_incarnation and i.state = 0) then
        return;
    end if;
    perform set_config('lock_timeout', '1s', true);

    delete from wh_cursor c
    using (
        -- Superseded, or of an incarnation whose partitions have its cursors as their bases.
        select c.incarnation, c.shard, c.number from wh_cursor c
        where exists (select from wh_cursor n
                where n.incarnation = c.incarnation and n.shard = c.shard and n.number > c.number)
            or not exists (select from wh_partition p where p.owner = c.incarnation)
            and not exists (select from wh_instance i where i.number = c.incarnation and i.state = 0)
        limit 1000
    ) old
    where c.incarnation = old.incarnation and c.shard = old.shard and c.number = old.number;
    get diagnostics cursors_trimmed = row_count;
    delete from wh_instance i
    where i.state <> 0 and i.lease_until < clock_timestamp() - interval '1 day'
        and not exists (select from wh_partition p where p.owner = i.number)
        and i.number in (select d.number from wh_instance d where d.state <> 0 order by d.number limit 100);

    delete from wh_flush_given_up g
    using (
        select g.incarnation, g.shard from wh_flush_given_up g
        where g.given_up_at < clock_timestamp() - interval '1 day' limit 1000
    ) old
    where g.incarnation = old.incarnation and g.shard = old.shard;
    delete from wh_flush_truncated t
    using (
        select t.incarnation, t.shard from wh_flush_truncated t
        where not exists (select from wh_instance i where i.number = t.incarnation and i.state = 0) limit 1000
    ) old
    where t.incarnation = old.incarnation and t.shard = old.shard;

    -- Of workers that are gone. Their own last calls may be at it.
    delete from wh_handed_out h
    using (
        select h.ctid from wh_handed_out h
        where not exists (select from wh_instance i where i.number = h.incarnation and i.state = 0)
        limit 1000 for update skip locked
    ) old
    where h.ctid = old.ctid;
    delete from wh_worker_watch w
    using (
        select w.ctid from wh_worker_watch w
        where not exists (select from wh_instance i where i.number = w.incarnation and i.state = 0)
        limit 1000 for update skip locked
    ) old
    where w.ctid = old.ctid;

    select s.current, s.switched_at into strict v_current, v_switched_at from wh_segment s;
    -- The one that writers go to next comes first: while it is not empty they cannot be switched.
    foreach v_segment in array array[(v_current + 1) % 3, (v_current + 2) % 3] loop
        execute format('select exists (select from wh_log_%s)', v_segment) into v_filled;
        continue when not v_filled;
        work_left := true;
        select r.* into v_rotation from wh_rotation r where r.segment = v_segment;
        if v_rotation.segment is null then
            insert into wh_rotation (segment, seen) values (v_segment, pg_current_snapshot())
            returning * into v_rotation;
        end if;
        v_done := v_rotation.is_resolved or wh_check_resolved(v_segment);
        if not v_done then
            more := more or exists (
                select from wh_rotation r where r.segment = v_segment and r.resolved_to > v_rotation.resolved_to);
            continue;
        end if;
        if not (v_rotation.is_noted or wh_note_flushes(v_segment)) then
            more := true;
            return;
        end if;
        if not v_rotation.is_carried then
            -- Committed before the lock is taken: who looks a number up afterwards must find it.
            perform wh_carry_numbers(v_segment);
            more := true;
            return;
        end if;
        select (t.truncated)::int4, t.blocked_by into truncated, blocked_by from wh_truncate_segment(v_segment) t;
        more := truncated > 0;
        return;
    end loop;

    v_segment := (v_current + 1) % 3;
    execute format('select exists (select from wh_log_%s)', v_current) into v_filled;
    work_left := work_left or v_filled;
    execute format('select $1 and not exists (select from wh_log_%s)', v_segment) into v_filled using v_filled;
    if v_filled then
        v_bytes := pg_total_relation_size(format('wh_log_%s', v_current)::regclass)
            + pg_total_relation_size(format('wh_outbox_%s', v_current)::regclass);
        if v_switched_at < clock_timestamp() - interval '60 s'
            or v_bytes > 268435456 and v_switched_at < clock_timestamp() - interval '5 s' then
            update wh_segment s set current = v_segment, switched_at = clock_timestamp();
            rotated := true;
            more := true;
        end if;
    end if;
end
$$;
