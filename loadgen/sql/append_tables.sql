-- The plainest event store: the engine's own table with its primary key and no other index, and a counter a stream for
-- the way that counts.
create table @schema@.append_event (like @schema@.wh_event_store including defaults, primary key (stream_id, version));
create table @schema@.append_counter (stream_id uuid primary key, version int8 not null);
