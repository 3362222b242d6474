-- wh_stream_key: the second half of a stream's advisory lock: 32 bits of the id.
-- Two streams with one key only wait for each other. The value is never stored, so that it may change with a
-- version of Postgres.
-- in: stream_id uuid    out: key int4
create or replace function @schema@.wh_stream_key(stream_id uuid) returns int4
language sql immutable parallel safe strict
return uuid_hash(stream_id);
