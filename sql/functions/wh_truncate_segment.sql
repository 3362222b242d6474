-- wh_truncate_segment: empties a segment of the log and of the outbox, if it may.
-- in: p_segment (found resolved and carried, in transactions that have committed)
-- out: truncated; blocked_by: pid of one that holds it, if it could not be locked
-- locks: wh_log_n and wh_outbox_n, ACCESS EXCLUSIVE, not waited for: a TRUNCATE that waits stalls every writer behind it
-- late rows: a transaction that began before the rotation may still have written here. Under the lock whatever is
--     committed is seen; what `seen` did not see sends the segment back to its checks.
-- cost: under the lock a probe for late rows by transaction id; then the files are made empty
create or replace function @schema@.wh_truncate_segment(p_segment int2, out truncated bool, out blocked_by int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_seen pg_snapshot;
    v_late bool;
begin
    truncated := false;
    begin
        execute format('lock table wh_log_%1$s, wh_outbox_%1$s in access exclusive mode nowait', p_segment);
    exception when lock_not_available then
        select l.pid into blocked_by
        from pg_locks l
        where l.locktype = 'relation' and l.granted and l.pid <> pg_backend_pid()
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.relation in (format('wh_log_%s', p_segment)::regclass, format('wh_outbox_%s', p_segment)::regclass)
        limit 1;
        return;
    end;

    -- A later statement than the lock.
    select r.seen into strict v_seen from wh_rotation r where r.segment = p_segment;
    execute format('select exists (select from wh_log_%s l where l.xid >= $1 or l.xid = any ($2))', p_segment)
    into v_late
    using pg_snapshot_xmax(v_seen)::text::int8, array(select x::text::int8 from pg_snapshot_xip(v_seen) x);
    delete from wh_rotation r where r.segment = p_segment;
    if v_late then
        return;
    end if;
    execute format('truncate wh_log_%1$s, wh_outbox_%1$s', p_segment);
    truncated := true;
end
$$;
