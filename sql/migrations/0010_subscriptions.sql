-- Subscriptions: who follows the events, who shares the work of each, and how far it has come.
--
-- Invariants
-- - A partition's row is its lock, its fence and its place in one: whoever takes it, or writes where it stands, updates
--   that row and raises the fence. One of two who do so sees the other, whichever commits first.
-- - What stands in a row as read has been committed before the row was: its transaction ids are never given again.
create table @schema@.wh_subscription (
    started_at int8 not null, -- only events with a higher position are of interest
    created_at timestamptz not null default clock_timestamp(),
    subscription int4 primary key generated always as identity,
    name text not null unique check (octet_length(name) between 1 and 255)
);

-- Who runs it. A member counts as long as its incarnation lives.
create table @schema@.wh_subscription_member (
    joined_at timestamptz not null default clock_timestamp(),
    subscription int4 not null references @schema@.wh_subscription on delete cascade,
    incarnation int4 not null,
    primary key (subscription, incarnation)
);

create table @schema@.wh_subscription_partition (
    fence int8 not null default 0,
    -- Nothing that `resolved` does not contain lies at or below, but for transactions that it lists.
    floor int8 not null default 0,
    target_floor int8 not null default 0,    -- `floor` when `target` has become `resolved`
    position int8 not null default 0, -- of what is in `target`, everything up to here has been read too
    -- What was read of the events up to wh_installation.rebased_position, whose ids were another server's: everything
    -- up to before_from, what is in before_resolved, and up to before_position what is in before_target.
    before_from int8 not null default 0,
    before_position int8 not null default 0,
    updated_at timestamptz not null default clock_timestamp(),
    subscription int4 not null references @schema@.wh_subscription on delete cascade,
    partition int4 not null,
    owner int4,
    before_is_foreign bool not null default false, -- events whose id is that of their row (xmin) have come since
    resolved pg_snapshot not null default '1:1:',
    target pg_snapshot, -- being read; null: nothing is
    before_resolved pg_snapshot not null default '1:1:',
    before_target pg_snapshot,
    primary key (subscription, partition)
) with (fillfactor = 50);

-- What is not summarized yet is read by every look: not left to the vacuum, which comes after a fifth of the table.
alter index @schema@.wh_event_store_position set (autosummarize = on);
alter index @schema@.wh_event_store_xid set (autosummarize = on);
