-- Workers that speak SQL only: they are incarnations like any other, but keep nothing in memory.
--
-- What such a worker has in hand, and what it has decided of transactions that its cursor has not passed yet. A row is
-- written when a reference is handed out, and goes when its transaction is resolved, or with the incarnation.
create table @schema@.wh_handed_out (
    xid int8 not null, -- of the reference's log row; 0 for one that is beside the log
    stream_seq int8 not null,
    version int8 not null,
    handed_at timestamptz not null,
    lane_id uuid not null,
    message_id uuid, -- null: its message was not there any more
    incarnation int4 not null,
    partition int4 not null,
    beside bool not null,
    decided bool not null default false,
    destination text not null,
    primary key (incarnation, lane_id, destination, stream_seq, beside)
) with (fillfactor = 80);
create index wh_handed_out_message on @schema@.wh_handed_out (incarnation, message_id);

-- For how long a worker has seen another's heartbeat stand still: it has no clock of its own between two calls.
create table @schema@.wh_worker_watch (
    counter int8 not null,
    watched_ms int8 not null default 0,
    looked_at timestamptz not null,
    incarnation int4 not null,
    watched int4 not null,
    primary key (incarnation, watched)
);

-- Which lanes are due, however many wait.
create index wh_parked_due on @schema@.wh_parked (due);

-- Every message that still stands in a segment, beside the log or in the dead letters, by destination, with the bits
-- that the reference keeps in a column: Stored 1, EventStored 2, Published 4 (as far as the cursors say), Failed 32768.
-- For an operator's question about some messages, not for a dashboard: it reads the log.
create view @schema@.wh_message_status as
    with reference as (
        select r.lane_id, l.destination[r.destination] as destination, r.stream_seq, r.version, r.partition, l.xid
        from @schema@.wh_log l
        cross join lateral (
            select unnest(l.partition) as partition, unnest(l.destination_index) as destination,
                unnest(l.stream_seq) as stream_seq, unnest(l.version) as version, unnest(l.lane_id) as lane_id
        ) r
        where r.stream_seq > 0 -- the others are words to owners
        union all
        select k.lane_id, k.destination, k.stream_seq, k.version, k.partition, null from @schema@.wh_parked_reference k
        union all
        select d.lane_id, d.destination, d.stream_seq, d.version, d.partition, null from @schema@.wh_dead_letter d
    ), message as (
        select r.lane_id, r.destination, r.stream_seq, max(r.version) as version, max(r.partition) as partition,
            max(r.xid) as xid
        from reference r
        group by r.lane_id, r.destination, r.stream_seq
    )
    select coalesce(e.message_id, o.message_id, b.message_id, d.message_id) as message_id, m.destination,
        coalesce(e.stream_id, o.stream_id, b.stream_id, d.stream_id) as stream_id, m.stream_seq, m.version, m.partition,
        coalesce(e.type_name, o.type_name, b.type_name, d.type_name) as type_name,
        coalesce(e.stored_at, o.stored_at, b.stored_at, d.stored_at) as stored_at,
        1 | case when m.version > 0 then 2 else 0 end
            | case when d.lane_id is null and b.lane_id is null and (h.decided
                or pg_visible_in_snapshot(m.xid::text::xid8, w.base)
                or pg_visible_in_snapshot(m.xid::text::xid8, w.cursor)) then 4 else 0 end
            | case when d.lane_id is not null or k.attempts > 0 then 32768 else 0 end as status,
        coalesce(d.attempts, k.attempts, 0) as attempts, coalesce(d.reason, k.reason, 0::int2) as reason,
        coalesce(d.error, k.error, '') as error, case when d.lane_id is null then k.due end as due, d.dead_at
    from message m
    left join @schema@.wh_resolved w on w.partition = m.partition
    left join @schema@.wh_dead_letter d
        on d.lane_id = m.lane_id and d.destination = m.destination and d.stream_seq = m.stream_seq
    left join @schema@.wh_parked_reference b
        on b.lane_id = m.lane_id and b.destination = m.destination and b.stream_seq = m.stream_seq
    left join @schema@.wh_parked k
        on k.lane_id = m.lane_id and k.destination = m.destination and k.stream_seq = m.stream_seq
    left join @schema@.wh_handed_out h
        on h.incarnation = w.owner and h.lane_id = m.lane_id and h.destination = m.destination
        and h.stream_seq = m.stream_seq and not h.beside and h.decided
    left join @schema@.wh_event_store e on m.version > 0 and e.stream_id = m.lane_id and e.version = m.version
    left join @schema@.wh_outbox o on m.version = 0 and o.lane_id = m.lane_id and o.stream_seq = m.stream_seq;
