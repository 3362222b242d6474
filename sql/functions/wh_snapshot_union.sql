-- wh_snapshot_union: the transactions that are in either set.
-- in: a, b pg_snapshot    out: pg_snapshot    locks: none    cost: the lists' lengths
create or replace function @schema@.wh_snapshot_union(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language sql immutable parallel safe strict
as $$
    with edge as (
        select greatest(pg_snapshot_xmax(a), pg_snapshot_xmax(b)) as xmax
    ), listed as (
        select x from pg_snapshot_xip(a) x where not pg_visible_in_snapshot(x, b)
        union
        select x from pg_snapshot_xip(b) x where not pg_visible_in_snapshot(x, a)
    )
    select (coalesce((select min(x) from listed), (select xmax from edge))::text
        || ':' || (select xmax from edge)::text
        || ':' || coalesce((select string_agg(x::text, ',' order by x) from listed), ''))::pg_snapshot
$$;
