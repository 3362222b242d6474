-- wh_inbox_day: the UTC day, counted from 1970, that a message's id says it was made on; -1 for an id that is no UUIDv7.
-- in: message_id uuid    out: int4
-- The id's own bytes and nothing else: the same id has the same day for ever. Inlined into the calling statement.
-- locks: none    cost: one expression
create or replace function @schema@.wh_inbox_day(message_id uuid) returns int4
language sql immutable strict parallel safe
as $$
    select case
        when pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 6) >> 4 = 7
            and pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 8) >> 6 = 2 then ((
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 0) * 1099511627776::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 1) * 4294967296::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 2) * 16777216::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 3) * 65536::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 4) * 256::int8 +
                pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 5)
            ) / 86400000)::int4
        else -1
    end
$$;
