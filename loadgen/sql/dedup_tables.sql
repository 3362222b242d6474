-- A memory of ids with its primary key.
create table @schema@.dedup_seen (message_id uuid, received_at timestamptz not null, consumer int2, primary key (message_id, consumer));
