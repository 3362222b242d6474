-- append_events: appends events to streams whose versions the caller expects, inside the caller's own transaction: all or
-- nothing, in one call. For callers in any language.
--
--     -- the 8th event of a stream, and the first of another, which must be new; the first is published to `orders`
--     select * from corelane.append_events(
--         array['018f…01', '018f…02']::uuid[], array['018f…aa', '018f…ab']::uuid[], array['OrderPaid', 'CartOpened'],
--         array[convert_to('{"total":3}', 'UTF8'), '\x7b7d'], array[7, 0], array['orders', null]);
--
-- in: arrays with an element an event, of one length: message_ids, stream_ids (not null), type_names, payloads (kept as the
--     bytes they are); expected_versions: the version that the stream has before this event, 0 for none, null for any;
--     null or absent where nothing is said: destinations (null: none), correlation_ids, causation_ids, content_types
--     (null: application/json), metadata
-- out: a row an event, in the order given: message_id, partition, stream_seq, version, position
-- errors: as expect_versions (CL010: a stream has another version; nothing is stored then) and store_outbox_messages; 22023
--     where events of one stream in the call expect what cannot all be true
-- locks: as store_outbox_messages    cost: as that, and a look-up a stream that something is expected of
create or replace function @schema@.append_events(
    message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], expected_versions int8[] default null,
    destinations text[] default null, correlation_ids uuid[] default null, causation_ids uuid[] default null,
    content_types text[] default null, metadata bytea[] default null)
returns table (message_id uuid, partition int4, stream_seq int8, version int8, "position" int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_count constant int4 := coalesce(cardinality(message_ids), 0);
    v_turn int8;
    v_stream uuid[];
    v_expected int8[];
begin
    if cardinality(stream_ids) is distinct from cardinality(message_ids)
        or cardinality(coalesce(expected_versions, array_fill(null::int8, array[v_count]))) is distinct from v_count then
        raise exception 'message_ids has % elements, stream_ids %, expected_versions %: give each event one', v_count,
            coalesce(cardinality(stream_ids), 0), coalesce(cardinality(expected_versions), 0) using errcode = '22023';
    end if;
    select s.turn into v_turn from unnest(stream_ids) with ordinality s(id, turn) where s.id is null order by 1 limit 1;
    if found then
        raise exception 'element %: an event stands in a stream', v_turn using errcode = '22023';
    end if;
    with e as (
        select e.id, e.turn, e.expected,
            e.expected - row_number() over (partition by e.id order by e.turn) + 1 as expected_first
        from unnest(stream_ids, expected_versions) with ordinality e(id, expected, turn)
    ), s as (
        select e.id, min(e.turn) as turn, min(e.expected_first) as expected, max(e.expected_first) as highest
        from e group by e.id
    )
    select array_agg(s.id order by s.turn), array_agg(s.expected order by s.turn),
        min(s.turn) filter (where s.expected <> s.highest or s.expected < 0)
    into v_stream, v_expected, v_turn
    from s;
    if v_turn is not null then
        raise exception 'element %: events of stream % expect what cannot all be true: each event raises the version by one',
            v_turn, stream_ids[v_turn] using errcode = '22023';
    end if;
    if v_count > 0 then
        perform expect_versions(v_stream, v_expected);
    end if;
    return query select * from store_outbox_messages(message_ids, stream_ids, type_names, payloads,
        array_fill(true, array[v_count]), coalesce(destinations, array_fill(null::text, array[v_count])),
        correlation_ids => append_events.correlation_ids, causation_ids => append_events.causation_ids,
        content_types => append_events.content_types, metadata => append_events.metadata);
end
$$;
