-- wh_check_resolved: goes on finding out whether every reference of a segment is resolved.
-- What was found resolved stays so: cursors and bases only grow. So it is done in steps, each from where the last one
-- ended, and never again.
-- in: p_segment (it has a row in wh_rotation)    out: whether all is
-- locks: none on the log    cost: a probe, if nothing is unresolved below the segment's end; else at most 5,000 log
--     rows and about 100,000 references a call (a shard without work does not move its cursor over another's)
create or replace function @schema@.wh_check_resolved(p_segment int2) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
declare
    v_low int8;
    v_to int8;
    v_done bool;
begin
    -- As texts, because snapshots cannot be compared: there are a few, and many partitions.
    select min(pg_snapshot_xmin(wh_snapshot_union(s.base::pg_snapshot, s.cursor::pg_snapshot))::text::int8) into v_low
    from (select distinct r.base::text as base, r.cursor::text as cursor from wh_resolved r) s;
    if not exists (select from wh_log l where l.segment = p_segment and l.xid >= v_low) then
        v_done := true;
        select r.resolved_to into v_to from wh_rotation r where r.segment = p_segment;
    else
        with page as (
            select l.position, l.xid, l.partition
            from (
                select l.*, sum(cardinality(l.partition)) over (order by l.position) - cardinality(l.partition) as before
                from (
                    select l.position, l.xid, l.partition
                    from wh_log l
                    where l.segment = p_segment
                        and l.position > (select r.resolved_to from wh_rotation r where r.segment = p_segment)
                    order by l.position
                    limit 5000
                ) l
            ) l
            where l.before < 100000
        ), resolved as materialized (
            select r.partition, r.base, r.cursor from wh_resolved r
        ), stop as (
            select min(p.position) as position
            from page p
            cross join lateral unnest(p.partition) u(partition)
            join resolved r on r.partition = u.partition
            where p.xid >= v_low
                and not pg_visible_in_snapshot(p.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(p.xid::text::xid8, r.cursor)
        )
        select max(p.position) filter (where s.position is null or p.position < s.position),
            bool_and(s.position is null) and not exists (
                select from wh_log l where l.segment = p_segment and l.position > (select max(p.position) from page p))
        into v_to, v_done
        from page p, stop s;
        v_done := coalesce(v_done, true);
    end if;
    update wh_rotation r set resolved_to = coalesce(v_to, r.resolved_to), is_resolved = v_done
    where r.segment = p_segment and (r.resolved_to, r.is_resolved) is distinct from (coalesce(v_to, r.resolved_to), v_done);
    return v_done;
end
$$;
