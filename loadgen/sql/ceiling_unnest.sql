-- The event rows of one batch from typed arrays, and nothing else: no lock, no look-up, no log.
-- What is equal for all rows of a call is a scalar.
insert into @schema@.ceiling_event (position, stream_seq, version, xid, span_id, stored_at, stream_id, message_id,
    correlation_id, causation_id, trace_id, partition, trace_flags, type_name, payload)
select $1 + place - 1, version, version, $2, span_id, $3, stream_id, message_id,
    correlation_id, causation_id, trace_id, partition, 1, $4, payload
from unnest($5::int8[], $6::int8[], $7::uuid[], $8::uuid[], $9::uuid[], $10::uuid[], $11::uuid[], $12::int4[], $13::bytea[])
    with ordinality as incoming (version, span_id, stream_id, message_id, correlation_id, causation_id, trace_id, partition, payload, place)
