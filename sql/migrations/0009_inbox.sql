-- The inbox: what each consumer has received, and the bodies of what outlives its first try.
--
-- Invariants
-- - No row of wh_inbox_seen is ever updated or deleted: days are truncated and dropped.
-- - The same id always meets the same part of wh_inbox_seen: `day` is a function of the id alone (wh_inbox_day), and a
--   day's part is made only while the default part holds none of its ids.
-- - A row of wh_inbox has a row in wh_inbox_parked for its lane, and whoever handles a lane holds its lock.

create table @schema@.wh_consumer (
    consumer int2 primary key generated always as identity,
    name text not null unique check (octet_length(name) between 1 and 255)
);

-- Which message each consumer has decided. Days of the id's own time: parts by the time of receipt would take the same
-- id twice. The day is a column and not the id's range, because version 4 ids have to stand apart: among them there is
-- one of every day, so that no day could ever be made, and each attempt would read all of them.
create table @schema@.wh_inbox_seen (
    received_at timestamptz not null,
    message_id uuid not null,
    day int4 not null, -- wh_inbox_day(message_id)
    consumer int2 not null,
    primary key (message_id, consumer, day)
) partition by list (day);
-- Whether all of a day is older than the window, without reading it.
create index wh_inbox_seen_received on @schema@.wh_inbox_seen using brin (received_at)
    with (pages_per_range = 64, autosummarize = on);
-- Ids without a time of their own.
create table @schema@.wh_inbox_seen_timeless partition of @schema@.wh_inbox_seen for values in (-1);
-- Ids whose day has no part: forged, from fast clocks, or older than the window. Never purged.
create table @schema@.wh_inbox_seen_other partition of @schema@.wh_inbox_seen default;

-- The days that were to have a part.
create table @schema@.wh_inbox_part (
    made_at timestamptz not null default clock_timestamp(),
    day int4 primary key,
    summarized_to int4 not null default 0, -- blocks that the BRIN index tells apart
    is_made bool not null -- false: its ids stay in the default part, which had some already
);

create table @schema@.wh_inbox (
    arrival int8 generated always as identity,
    span_id int8,
    received_at timestamptz not null default clock_timestamp(),
    lane_id uuid not null,
    stream_id uuid,
    message_id uuid not null,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    retried int4 not null default 0,
    consumer int2 not null,
    trace_flags int2,
    source text not null,
    type_name text not null,
    content_type text,
    metadata bytea,
    payload bytea not null,
    primary key (consumer, message_id)
);
create index wh_inbox_lane on @schema@.wh_inbox (consumer, lane_id, arrival);

-- Lanes that do not go on by themselves: what arrives is stored behind.
create table @schema@.wh_inbox_parked (
    due timestamptz not null,
    parked_at timestamptz not null default clock_timestamp(),
    lane_id uuid not null,
    message_id uuid not null, -- the one that failed: attempts are its own
    partition int4 not null,
    attempts int4 not null,
    consumer int2 not null,
    reason int2 not null,
    held bool not null default false, -- behind a dead message; due is infinity
    error_cut bool not null default false,
    error text not null default '',
    primary key (consumer, lane_id)
);
create index wh_inbox_parked_due on @schema@.wh_inbox_parked (consumer, due) where due < 'infinity';

create table @schema@.wh_inbox_dead_letter (
    dead_letter_id int8 primary key generated always as identity,
    arrival int8 not null,
    span_id int8,
    received_at timestamptz not null,
    dead_at timestamptz not null default clock_timestamp(),
    lane_id uuid not null,
    stream_id uuid,
    message_id uuid not null,
    correlation_id uuid,
    causation_id uuid,
    trace_id uuid,
    attempts int4 not null,
    retried int4 not null,
    consumer int2 not null,
    trace_flags int2,
    reason int2 not null,
    error_cut bool not null default false,
    source text not null,
    error text not null default '',
    error_fingerprint text not null,
    type_name text not null,
    content_type text,
    metadata bytea,
    payload bytea not null,
    unique (consumer, message_id)
);
