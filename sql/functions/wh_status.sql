-- wh_status: what an operator wants to know at a glance.
-- in: nothing
-- out: a row a figure: what, figure, note (null where there is nothing to add)
-- locks: none    cost: one pass over the log, over what the inbox keeps, and over 100,000 events that a subscription has not
--     read (where counting ends): not for a dashboard that asks every second while a backlog is large
create or replace function @schema@.wh_status() returns table (what text, figure int8, note text)
language sql stable
set search_path = @schema@, pg_temp
set jit = off
as $$
    select 'generation', i.generation::int8, format('installed %s, %s partitions', i.created_at::timestamptz(0), i.partition_count)
    from wh_installation i
    union all
    select 'pending', coalesce(sum(p.size), 0)::int8, 'references in the log that no cursor has passed'
    from (
        select count(*) as size
        from wh_log l
        cross join lateral unnest(l.partition, l.stream_seq) u(partition, stream_seq)
        join wh_resolved r on r.partition = u.partition
        where u.stream_seq > 0 -- the others are words to owners
            and not pg_visible_in_snapshot(l.xid::text::xid8, r.base)
            and not pg_visible_in_snapshot(l.xid::text::xid8, r.cursor)
    ) p
    union all
    select 'parked', count(*), 'lanes; the longest since ' || min(k.parked_at)::timestamptz(0) from wh_parked k
    union all
    select 'kept_beside', count(*), 'references that wait behind parked heads' from wh_parked_reference
    union all
    select 'dead_letters', count(*), 'the latest at ' || max(d.dead_at)::timestamptz(0) from wh_dead_letter d
    union all
    select 'scheduled', count(*), 'the next due ' || min(s.due)::timestamptz(0) from wh_scheduled s
    union all
    select 'segment', s.current, format('since %s', s.switched_at::timestamptz(0)) from wh_segment s
    union all
    select format('segment_%s_bytes', k), pg_total_relation_size(format('wh_log_%s', k)::regclass)
        + pg_total_relation_size(format('wh_outbox_%s', k)::regclass), null
    from generate_series(0, 2) k
    union all
    select 'partitions_free', count(*), 'nobody publishes for them' from wh_partition p where p.owner is null
    union all
    (select format('instance_%s', i.number), (select count(*) from wh_partition p where p.owner = i.number),
        format('partitions held by %s (%s), lease until %s%s', i.instance_name, i.service_name,
            i.lease_until::timestamptz(0), case when i.lease_until < clock_timestamp() then ', EXPIRED' end)
    from wh_instance i where i.state = 0 order by i.number)
    union all
    (select format('consumer_%s', c.consumer), (select count(*) from wh_inbox i where i.consumer = c.consumer),
        format('messages kept for %s; %s lanes wait, %s of them for an operator%s; %s dead letters', c.name, k.parked, k.held,
            ', the longest since ' || k.oldest::timestamptz(0),
            (select count(*) from wh_inbox_dead_letter d where d.consumer = c.consumer))
    from wh_consumer c
    cross join lateral (
        select count(*) as parked, count(*) filter (where p.held) as held, min(p.parked_at) as oldest
        from wh_inbox_parked p where p.consumer = c.consumer
    ) k
    order by c.consumer)
    union all
    (select format('subscription_%s', s.subscription), m.events,
        format('events not read by %s, the oldest %s s old; all is read to position %s; %s members%s', s.name,
            m.oldest_age_ms / 1000, (
                select min(p.floor) from wh_subscription_partition p where p.subscription = s.subscription),
            m.members, nullif(format(', %s partitions WITHOUT ONE', m.partitions_free), ', 0 partitions WITHOUT ONE'))
    from wh_subscription s
    cross join lateral measure_subscription(s.name, 100000) m
    order by s.subscription)
$$;
