-- wh_lane: the lane of a message without stream: its id with one bit turned, so that it is no stream's lane.
-- in: message_id uuid    out: uuid
-- A message's id may well be a stream's id too: the command that creates order 7, kept apart by that id, and the
-- stream of order 7. In one lane the numbers of the two would be taken for each other's. The bit is the first of
-- byte 8, of an id's variant: what makes ids today makes none with it turned. As `ids::lane_of_message` in the library;
-- messages that schema version 1 has stored without stream have their id itself for a lane.
-- locks: none    cost: one expression, inlined
create or replace function @schema@.wh_lane(message_id uuid) returns uuid
language sql immutable strict parallel safe
as $$
    select pg_catalog.encode(pg_catalog.set_byte(pg_catalog.uuid_send(message_id), 8,
        pg_catalog.get_byte(pg_catalog.uuid_send(message_id), 8) # 128), 'hex')::pg_catalog.uuid
$$;
