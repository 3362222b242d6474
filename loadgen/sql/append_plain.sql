-- Append with expected versions, the plainest correct way: the number after the expected one, and the unique index
-- refuses what somebody else has taken (23505: look up, and again).
insert into @schema@.append_event (position, stream_seq, version, xid, stored_at, stream_id, message_id, correlation_id,
    partition, type_name, payload)
select $1 + place - 1, expected + 1, expected + 1, 1, now(), stream_id, message_id, $2, partition, $3, payload
from unnest($4::uuid[], $5::int8[], $6::uuid[], $7::int4[], $8::bytea[])
    with ordinality as incoming (stream_id, expected, message_id, partition, payload, place)
