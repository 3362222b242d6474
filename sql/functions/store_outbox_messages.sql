-- store_outbox_messages: puts messages into the outbox and events into the event store, inside the caller's own
-- transaction: they are there when it commits, and leave nothing when it rolls back. For callers in any language.
--
--     -- an event of a stream, published to `orders`, and one that is only stored
--     select * from corelane.store_outbox_messages(
--         array['018f…01', '018f…02']::uuid[], array['018f…aa', '018f…aa']::uuid[],
--         array['OrderPlaced', 'OrderPriced'], array[convert_to('{"total":3}', 'UTF8'), '\x7b7d'],
--         array[true, true], array['orders', null]);
--     -- a command without order, due in an hour, and traced
--     select * from corelane.store_outbox_messages(
--         array[gen_random_uuid()], array[null]::uuid[], array['SendReminder'], array['\x7b7d'::bytea],
--         array[false], array['mail'], dues => array[now() + interval '1 hour'], correlation_ids => array['018f…01'::uuid]);
--     -- one event to two destinations: the second by the number of its message
--     select * from corelane.store_outbox_messages(
--         array['018f…03']::uuid[], array['018f…aa']::uuid[], array['OrderPaid'], array['\x7b7d'::bytea], array[true],
--         array['orders'], reference_messages => array[1], reference_destinations => array['billing']);
--
-- in: arrays with an element a message, of one length:
--     message_ids; stream_ids (null: no order); type_names; payloads (the bytes are published as they are);
--     event_flags; destinations (null: none); null or absent where nothing is said: correlation_ids, causation_ids,
--     trace_ids, span_ids, trace_flags, content_types (null: application/json), metadata, dues (not for events)
--     further destinations: reference_messages (1 for the first message) with reference_destinations
-- out: a row a message, in the order given: message_id, partition, stream_seq (the place among everything of the
--     stream), version (the place among its events, 0 for others), position; without numbers if it is scheduled
-- errors: 22023 for an element that cannot be stored, with its number and message id; nothing is stored then.
--     40001 at REPEATABLE READ or SERIALIZABLE where the snapshot does not show the stream's last number: run the
--     transaction again. 40P01 like any two transactions that touch several streams in several calls in different
--     orders: make one call, or ascending ones.
-- locks: partitions of the streams (shared, ascending), then the streams (exclusive, ascending, waiting); with more
--     than 256 streams in the call the partitions exclusively instead. Held to the end of the transaction: whoever
--     stores on the same stream waits for it, nobody else does. No NOTIFY, so that PREPARE TRANSACTION works.
-- cost: a few statements of constant number; a look-up a stream, no work a row but the inserts
create or replace function @schema@.store_outbox_messages(
    message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], event_flags bool[],
    destinations text[], reference_messages int4[] default null, reference_destinations text[] default null,
    correlation_ids uuid[] default null, causation_ids uuid[] default null, trace_ids uuid[] default null,
    span_ids int8[] default null, trace_flags int2[] default null, content_types text[] default null,
    metadata bytea[] default null, dues timestamptz[] default null)
returns table (message_id uuid, partition int4, stream_seq int8, version int8, "position" int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_partition_count int4;
    v_many bool;
begin
    perform wh_check_messages(message_ids, stream_ids, type_names, payloads, event_flags, destinations,
        reference_messages, reference_destinations, correlation_ids, causation_ids, trace_ids, span_ids, trace_flags,
        content_types, metadata, dues);
    select i.partition_count into strict v_partition_count from wh_installation i;

    select count(*) > 256 into v_many from (
        select distinct s.id from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null limit 257
    ) s;
    if v_many then
        perform pg_advisory_xact_lock(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition
            from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null
            order by 1
        ) p;
    else
        perform pg_advisory_xact_lock_shared(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition
            from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null
            order by 1
        ) p;
        perform pg_advisory_xact_lock(wh_lock_class(2), s.key) from (
            select distinct wh_stream_key(s.id) as key
            from unnest(stream_ids, dues) s(id, due) where s.id is not null and s.due is null
            order by 1
        ) s;
    end if;

    -- Later statements than the locks.
    return query select * from wh_store_locked(v_partition_count, message_ids, stream_ids, type_names, payloads,
        event_flags, destinations, reference_messages, reference_destinations, correlation_ids, causation_ids,
        trace_ids, span_ids, trace_flags, content_types, metadata, dues);
end
$$;
