-- wh_snapshot_of: the set of all transactions below one, except those listed.
-- in: p_xmax int8 (at least 1); p_listed int8[] (any order, doubles and those from p_xmax on are passed over)
-- out: pg_snapshot    locks: none    cost: the list's length
create or replace function @schema@.wh_snapshot_of(p_xmax int8, p_listed int8[]) returns pg_snapshot
language sql immutable parallel safe strict
as $$
    select (coalesce(min(l.x), p_xmax)::text || ':' || p_xmax::text || ':'
        || coalesce(string_agg(l.x::text, ',' order by l.x), ''))::pg_snapshot
    from (select distinct x from unnest(p_listed) x where x < p_xmax) l
$$;
