-- Append with expected versions over a counter row a stream: it is compared and raised, ascending; whose counter has
-- another value is left out. Answers the streams whose event was stored.
with incoming as (
    select * from unnest($4::uuid[], $5::int8[], $6::uuid[], $7::int4[], $8::bytea[])
        with ordinality as i(stream_id, expected, message_id, partition, payload, place)
), counted as (
    insert into @schema@.append_counter as c (stream_id, version)
    select i.stream_id, i.expected + 1 from incoming i order by i.stream_id
    on conflict (stream_id) do update set version = excluded.version where c.version = excluded.version - 1
    returning c.stream_id, c.version
)
insert into @schema@.append_event (position, stream_seq, version, xid, stored_at, stream_id, message_id, correlation_id,
    partition, type_name, payload)
select $1 + i.place - 1, c.version, c.version, 1, now(), i.stream_id, i.message_id, $2, i.partition, $3, i.payload
from incoming i join counted c on c.stream_id = i.stream_id
returning stream_id
