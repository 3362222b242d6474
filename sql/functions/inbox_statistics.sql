-- inbox_statistics: the inbox in figures, for metrics: ask for them once in ten seconds or less.
-- in: nothing
-- out: consumers; days (parts of the memory), days_skipped (have none, because the default part held ids of them),
--     oldest_day (counted from 1970; null: none); seen_bytes, all parts; timeless_rows: ids without a time, which are never
--     forgotten; other_rows: ids that stand with no day, misdated ones (estimates of the last vacuum or analyze); kept: messages
--     that outlive their first try, kept_bytes; parked lanes, of them held, overdue (due since a minute);
--     oldest_parked_ms; dead_letters
-- locks: none    cost: one pass over wh_inbox_parked, index entries of wh_inbox and wh_inbox_dead_letter
create or replace function @schema@.inbox_statistics(
    out consumers int4, out days int4, out days_skipped int4, out oldest_day int4, out seen_bytes int8,
    out timeless_rows int8, out other_rows int8, out kept int8, out kept_bytes int8, out parked int8, out held int8,
    out overdue int8, out oldest_parked_ms int8, out dead_letters int8)
language sql stable
set search_path = @schema@, pg_temp
as $$
    select
        (select count(*)::int4 from wh_consumer),
        p.days, p.days_skipped, p.oldest_day,
        (select sum(pg_total_relation_size(t.relid))::int8 from pg_partition_tree('wh_inbox_seen'::regclass) t where t.isleaf),
        (select greatest(c.reltuples, 0)::int8 from pg_class c where c.oid = 'wh_inbox_seen_timeless'::regclass),
        (select sum(greatest(c.reltuples, 0))::int8 from pg_class c
            where c.oid in ('wh_inbox_seen_other'::regclass, 'wh_inbox_seen_misdated'::regclass)),
        (select count(*) from wh_inbox), pg_total_relation_size('wh_inbox'::regclass),
        k.parked, k.held, k.overdue, k.oldest_parked_ms,
        (select count(*) from wh_inbox_dead_letter)
    from (
        select count(*) filter (where p.is_made)::int4 as days, count(*) filter (where not p.is_made)::int4 as days_skipped,
            min(p.day) filter (where p.is_made) as oldest_day
        from wh_inbox_part p
    ) p, (
        select count(*) as parked, count(*) filter (where k.held) as held,
            count(*) filter (where k.due < clock_timestamp() - interval '1 minute') as overdue,
            (extract(epoch from clock_timestamp() - min(k.parked_at)) * 1000)::int8 as oldest_parked_ms
        from wh_inbox_parked k
    ) k
$$;
