-- Tables of the engine. Forward only; `@schema@` becomes the quoted schema.
--
-- Invariants
-- - No row of wh_event_store, wh_outbox or wh_log is ever updated or deleted: segments are truncated.
-- - A transaction writes its wh_log and wh_outbox rows into the same segment.
-- - Columns are ordered by alignment: eight bytes, uuids, four bytes, two bytes, then what varies.
-- - Every stored message has a position; along a stream it grows, because it is drawn after the stream's lock.

create table @schema@.wh_installation (
    only_row bool primary key default true check (only_row),
    -- Where the transaction ids in here were given. Elsewhere (restored, copied) they mean nothing: `rebase`.
    system_identifier int8 not null,
    -- Messages up to here were stored before the last rebase: their xid is another server's.
    rebased_position int8 not null default 0,
    created_at timestamptz not null default clock_timestamp(),
    database_oid oid not null,
    partition_count int4 not null check (partition_count between 1 and 65536),
    generation int4 not null default 1
);

-- One life of the server: emptied by crash recovery, because transaction ids may then be given again.
create unlogged table @schema@.wh_epoch (
    only_row bool primary key default true check (only_row),
    token uuid not null default gen_random_uuid()
);

create table @schema@.wh_instance (
    counter int8 not null default 0,
    ownership int8 not null default 0,
    lease_until timestamptz not null,
    started_at timestamptz not null default clock_timestamp(),
    id uuid not null unique,
    number int4 primary key generated always as identity,
    shards int4 not null default 1 check (shards between 1 and 1024),
    state int2 not null default 0 check (state in (0, 1, 2)), -- alive, dead, stopped
    service_name text not null check (octet_length(service_name) between 1 and 255),
    instance_name text not null check (octet_length(instance_name) between 1 and 255)
);

create table @schema@.wh_partition (
    fence int8 not null default 0,
    ownership int8 not null default 0, -- of the owner, when it took the partition: older cursors of it say nothing here
    partition int4 primary key,
    owner int4 references @schema@.wh_instance (number),
    -- What was resolved when the owner took it; united with the owner's latest cursor it is what is resolved now.
    base pg_snapshot not null default '1:1:'
);

create sequence @schema@.wh_position as int8 increment by 4096 minvalue 1 start 1;

create table @schema@.wh_event_store (
    position int8 not null,
    stream_seq int8 not null,
    version int8 not null,
    xid int8 not null,
    span_id int8,
    stored_at timestamptz not null,
    stream_id uuid not null,
    message_id uuid not null,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition int4 not null,
    trace_flags int2,
    type_name text not null,
    content_type text, -- null: application/json
    metadata bytea,
    payload bytea not null,
    primary key (stream_id, version)
);
create index wh_event_store_position on @schema@.wh_event_store using brin (position) with (pages_per_range = 32);
create index wh_event_store_xid on @schema@.wh_event_store using brin (xid) with (pages_per_range = 32);

create table @schema@.wh_outbox (
    position int8 not null,
    stream_seq int8 not null,
    xid int8 not null,
    span_id int8,
    stored_at timestamptz not null,
    lane_id uuid not null, -- the stream, or the message itself where it has none
    stream_id uuid,
    message_id uuid not null,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition int4 not null,
    trace_flags int2,
    segment int2 not null,
    type_name text not null,
    content_type text,
    metadata bytea,
    payload bytea not null
) partition by list (segment);

create table @schema@.wh_log (
    position int8 not null, -- of the call's first message, + 1 for each further log row of the call
    xid int8 not null,
    floor int8 not null,    -- every transaction with a higher id has drawn positions above this one (0: not known)
    flush_number int8,      -- null: not written by a shard
    incarnation int4,
    shard int2,
    segment int2 not null,
    owned bool not null,    -- every reference is of a partition that the writing shard held
    partition int4[] not null,
    destination_index int2[] not null, -- 1-based into destination
    stream_seq int8[] not null,
    version int8[] not null, -- 0: the message is a row of wh_outbox
    lane_id uuid[] not null,
    destination text[] not null
) partition by list (segment);

create table @schema@.wh_segment (
    only_row bool primary key default true check (only_row),
    switched_at timestamptz not null default clock_timestamp(),
    current int2 not null default 0 check (current between 0 and 2)
);

-- A segment that is being emptied: how far its rows have been found resolved, and its numbers been carried to
-- wh_stream. What `seen` does not see has come later.
create table @schema@.wh_rotation (
    resolved_to int8 not null default 0,                                     -- position in wh_log
    carried_to uuid not null default '00000000-0000-0000-0000-000000000000', -- lane in wh_outbox
    segment int2 primary key,
    is_resolved bool not null default false,
    is_carried bool not null default false,
    seen pg_snapshot not null
);

do $$
begin
    for segment in 0..2 loop
        execute format('create table %2$s.wh_outbox_%1$s partition of %2$s.wh_outbox for values in (%1$s)', segment, '@schema@');
        execute format('create unique index wh_outbox_%1$s_lane on %2$s.wh_outbox_%1$s (lane_id, stream_seq)', segment, '@schema@');
        execute format('create table %2$s.wh_log_%1$s partition of %2$s.wh_log for values in (%1$s)', segment, '@schema@');
        -- A claim walks by position and reads what its snapshot lists by xid, there by position as well: a page
        -- costs what it holds, whatever the backlog.
        execute format('create index wh_log_%1$s_position on %2$s.wh_log_%1$s (position)', segment, '@schema@');
        execute format('create index wh_log_%1$s_xid on %2$s.wh_log_%1$s (xid, position)', segment, '@schema@');
        execute format('create index wh_log_%1$s_foreign on %2$s.wh_log_%1$s (xid) where not owned', segment, '@schema@');
        -- A row of the log stays in its page: no TOAST, no compression.
        execute format('alter table %2$s.wh_log_%1$s alter column partition set storage plain,'
            ' alter column destination_index set storage plain, alter column stream_seq set storage plain,'
            ' alter column version set storage plain, alter column lane_id set storage plain,'
            ' alter column destination set storage main', segment, '@schema@');
        execute format('alter table %2$s.wh_log_%1$s set (toast_tuple_target = 8160)', segment, '@schema@');
    end loop;
end
$$;

-- The last number of a stream whose last row of wh_outbox was truncated.
create table @schema@.wh_stream (
    last_seq int8 not null,
    stream_id uuid primary key
);

-- How far a shard has come: appended, the highest number counts. `ownership` is the incarnation's set of
-- partitions that the shard knew: of a partition taken since, the cursor says nothing.
create table @schema@.wh_cursor (
    number int8 generated always as identity,
    ownership int8 not null,
    written_at timestamptz not null default clock_timestamp(),
    incarnation int4 not null,
    shard int2 not null,
    resolved pg_snapshot not null,
    primary key (incarnation, shard, number)
);

-- A shard's newest flush that was looked up after a lost connection and not found. Its call may not have reached the
-- server yet: when it does, it is refused, since its rows have been sent again.
create table @schema@.wh_flush_given_up (
    flush_number int8 not null,
    given_up_at timestamptz not null default clock_timestamp(),
    incarnation int4 not null,
    shard int2 not null,
    primary key (incarnation, shard)
);

-- What is resolved for a partition: the union of both snapshots (wh_snapshot_union).
create view @schema@.wh_resolved as
    select p.partition, p.owner, p.base, coalesce(c.resolved, '1:1:'::pg_snapshot) as cursor
    from @schema@.wh_partition p
    left join @schema@.wh_instance i on i.number = p.owner
    left join lateral (
        select c.resolved
        from @schema@.wh_cursor c
        where c.incarnation = i.number and c.shard = (p.partition % i.shards)::int2 and c.ownership >= p.ownership
        order by c.number desc
        limit 1
    ) c on true;

create table @schema@.wh_parked (
    stream_seq int8 not null,
    due timestamptz not null,
    parked_at timestamptz not null default clock_timestamp(),
    lane_id uuid not null,
    partition int4 not null,
    attempts int4 not null,
    reason int2 not null,
    error_cut bool not null default false,
    destination text not null,
    error text not null default '',
    primary key (lane_id, destination)
);
create index wh_parked_partition on @schema@.wh_parked (partition);

-- References the cursor has passed. The body is copied for a message of wh_outbox (version 0).
create table @schema@.wh_parked_reference (
    stream_seq int8 not null,
    version int8 not null,
    position int8,
    span_id int8,
    stored_at timestamptz,
    lane_id uuid not null,
    stream_id uuid,
    message_id uuid,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition int4 not null,
    trace_flags int2,
    destination text not null,
    type_name text,
    content_type text,
    metadata bytea,
    payload bytea,
    primary key (lane_id, destination, stream_seq)
);

create table @schema@.wh_dead_letter (
    dead_letter_id int8 primary key generated always as identity,
    stream_seq int8 not null,
    version int8 not null,
    position int8,
    span_id int8,
    stored_at timestamptz,
    dead_at timestamptz not null default clock_timestamp(),
    lane_id uuid not null,
    stream_id uuid,
    message_id uuid,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition int4 not null,
    attempts int4 not null,
    trace_flags int2,
    reason int2 not null,
    error_cut bool not null default false,
    destination text not null,
    error text not null default '',
    error_fingerprint text not null,
    type_name text,
    content_type text,
    metadata bytea,
    payload bytea,
    unique (lane_id, destination, stream_seq)
);

-- Messages that have no number yet: they get it when they are due.
create table @schema@.wh_scheduled (
    scheduled_id int8 primary key generated always as identity,
    span_id int8,
    due timestamptz not null,
    lane_id uuid not null,
    stream_id uuid,
    message_id uuid not null,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    partition int4 not null,
    trace_flags int2,
    type_name text not null,
    content_type text,
    metadata bytea,
    payload bytea not null,
    destination text[] not null
);
create index wh_scheduled_due on @schema@.wh_scheduled (due);
