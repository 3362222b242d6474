-- The calls that the header of store_outbox_messages shows, as a program without any library of ours makes them.
-- Every statement raises an error if the answer is not the one the header promises.

-- An event of a stream that is published, and one that is only stored.
do $$
declare
    v_seen text;
begin
    select string_agg(format('%s/%s', s.stream_seq, s.version), ' ' order by s.position) into v_seen
    from @schema@.store_outbox_messages(
        array['018f0000-0000-7000-8000-000000000001', '018f0000-0000-7000-8000-000000000002']::uuid[],
        array['018f0000-0000-7000-8000-0000000000aa', '018f0000-0000-7000-8000-0000000000aa']::uuid[],
        array['OrderPlaced', 'OrderPriced'], array[convert_to('{"total":3}', 'UTF8'), '\x7b7d'],
        array[true, true], array['orders', null]) s;
    assert v_seen = '1/1 2/2', v_seen;
    assert (select sum(cardinality(l.partition)) from @schema@.wh_log l) = 1, 'one of two is to be published';
end
$$;

-- A command without order, due in an hour, that says what it belongs to.
do $$
begin
    perform @schema@.store_outbox_messages(
        array[gen_random_uuid()], array[null]::uuid[], array['SendReminder'], array['\x7b7d'::bytea],
        array[false], array['mail'], dues => array[now() + interval '1 hour'],
        correlation_ids => array['018f0000-0000-7000-8000-000000000001'::uuid]);
    assert (select count(*) from @schema@.wh_scheduled s
        where s.destination = array['mail'] and s.correlation_id is not null and s.due > now()) = 1, 'it is scheduled';
end
$$;

-- One event to two destinations.
do $$
begin
    perform @schema@.store_outbox_messages(
        array['018f0000-0000-7000-8000-000000000003']::uuid[], array['018f0000-0000-7000-8000-0000000000aa']::uuid[],
        array['OrderPaid'], array['\x7b7d'::bytea], array[true], array['orders'],
        reference_messages => array[1], reference_destinations => array['billing']);
    assert (select l.destination from @schema@.wh_log l order by l.position desc limit 1) = array['billing', 'orders'],
        'both destinations stand in one row of the log';
end
$$;

-- A refusal is caught by its SQLSTATE, and leaves nothing.
do $$
begin
    perform @schema@.store_outbox_messages(
        array[gen_random_uuid()], array['00000000-0000-0000-0000-000000000000']::uuid[], array['OrderPaid'],
        array['\x7b7d'::bytea], array[true], array['orders']);
    raise exception 'the nil UUID was taken for a stream';
exception
    when invalid_parameter_value then
        assert (select count(*) from @schema@.wh_event_store) = 3, 'nothing was stored';
end
$$;

-- No messages are no error, and no row.
do $$
begin
    assert not exists (select from @schema@.store_outbox_messages('{}', '{}', '{}', '{}', '{}', '{}')), 'nothing';
    assert (select count(*) from @schema@.wh_log) = 2, 'nothing';
end
$$;
