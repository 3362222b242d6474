-- The seed's two tables with the keys it states, and of its indexes only the one the claim needs (the reference has
-- twelve on the outbox): a fair baseline is the seed at its best. `@schema@` becomes the quoted schema.

create table @schema@.seed_event_store (
    event_id uuid primary key,
    stream_id uuid not null,
    event_type text not null,
    event_data jsonb not null, -- the payload alone
    metadata jsonb not null,
    scope jsonb,
    version int4 not null,
    sequence_number int8 not null generated always as identity,
    created_at timestamptz not null default now(),
    unique (stream_id, version)
);

create table @schema@.seed_outbox (
    message_id uuid primary key,
    stream_id uuid,
    destination text,
    message_type text not null,
    event_data jsonb not null, -- the whole envelope
    metadata jsonb not null,
    scope jsonb,
    place int8 not null generated always as identity,
    partition_number int4,
    is_event bool not null default false,
    status int4 not null default 1,
    attempts int4 not null default 0,
    error text,
    failure_reason int4 not null default 99,
    instance_id uuid,
    lease_expiry timestamptz,
    scheduled_for timestamptz,
    created_at timestamptz not null default now()
);
-- What is neither published nor failed, in order: the seed orders by created_at, which is equal within a call. The
-- lease is in no index, so that a claim can be a HOT update where the page has room.
create index seed_outbox_claim on @schema@.seed_outbox (place) where status & 32772 = 0;
