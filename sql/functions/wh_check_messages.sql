-- wh_check_messages: refuses what store_outbox_messages cannot store, before anything is locked or written.
-- in: as store_outbox_messages    out: nothing
-- errors: 22023, naming the element and its message id, or the array whose length differs
-- locks: none    cost: one pass
create or replace function @schema@.wh_check_messages(
    message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], event_flags bool[],
    destinations text[], reference_messages int4[], reference_destinations text[],
    correlation_ids uuid[], causation_ids uuid[], trace_ids uuid[],
    span_ids int8[], trace_flags int2[], content_types text[], metadata bytea[], dues timestamptz[])
returns void
language plpgsql stable
set search_path = @schema@, pg_temp
as $$
declare
    v_count constant int4 := cardinality(message_ids);
    v_array text;
    v_length int4;
    v_element int8;
    v_message uuid;
    v_problem text;
begin
    if v_count is null then
        raise exception 'message_ids is null' using errcode = '22023';
    end if;
    select a.name, a.length into v_array, v_length
    from (values
        ('stream_ids', coalesce(cardinality(stream_ids), -1)), ('type_names', coalesce(cardinality(type_names), -1)),
        ('payloads', coalesce(cardinality(payloads), -1)), ('event_flags', coalesce(cardinality(event_flags), -1)),
        ('destinations', coalesce(cardinality(destinations), -1)), ('correlation_ids', cardinality(correlation_ids)),
        ('causation_ids', cardinality(causation_ids)), ('trace_ids', cardinality(trace_ids)),
        ('span_ids', cardinality(span_ids)), ('trace_flags', cardinality(trace_flags)),
        ('content_types', cardinality(content_types)), ('metadata', cardinality(metadata)), ('dues', cardinality(dues))
    ) a(name, length)
    where a.length <> v_count
    limit 1;
    if v_array is not null then
        raise exception '% has % elements, message_ids has %', v_array,
            case when v_length = -1 then 'no' else v_length::text end, v_count using errcode = '22023';
    end if;
    if coalesce(cardinality(reference_messages), 0) <> coalesce(cardinality(reference_destinations), 0) then
        raise exception 'reference_messages has % elements, reference_destinations has %',
            coalesce(cardinality(reference_messages), 0), coalesce(cardinality(reference_destinations), 0)
            using errcode = '22023';
    end if;

    select m.element, m.message_id, p.problem into v_element, v_message, v_problem
    from unnest(message_ids, stream_ids, type_names, payloads, event_flags, destinations, content_types, metadata, dues)
        with ordinality m(message_id, stream_id, type_name, payload, is_event, destination, content_type, metadata, due,
        element)
    cross join lateral (
        select case
            when m.message_id is null then 'the message id is null'
            when m.message_id = '00000000-0000-0000-0000-000000000000' then 'the nil UUID is not a message id'
            when m.stream_id = '00000000-0000-0000-0000-000000000000' then
                'the nil UUID is not a stream id: give null for a message without order, or the stream''s real id'
            when m.type_name is null then 'the type name is null'
            when octet_length(m.type_name) not between 1 and 255 then
                format('the type name has %s bytes, allowed are 1 to 255', octet_length(m.type_name))
            when m.payload is null then 'the payload is null (an empty one is ''\x'')'
            when octet_length(m.payload) > 67108864 then
                format('the payload has %s bytes, allowed are 67108864', octet_length(m.payload))
            when m.is_event is null then 'whether it is an event is null'
            when octet_length(m.destination) not between 1 and 255 then
                format('the destination has %s bytes, allowed are 1 to 255', octet_length(m.destination))
            when octet_length(m.content_type) not between 1 and 255 then
                format('the content type has %s bytes, allowed are 1 to 255', octet_length(m.content_type))
            when octet_length(m.metadata) > 65536 then
                format('the metadata have %s bytes, allowed are 65536', octet_length(m.metadata))
            when m.due is not null and m.is_event then
                'an event cannot be scheduled: schedule a command that appends it'
            when not isfinite(m.due) then 'the due time is not finite'
        end as problem
    ) p
    where p.problem is not null
    order by m.element
    limit 1;
    if v_problem is not null then
        raise exception 'element % (message %): %', v_element, coalesce(v_message::text, 'null'), v_problem
            using errcode = '22023';
    end if;

    if cardinality(reference_messages) > 0 then
        select r.element, p.problem into v_element, v_problem
        from unnest(reference_messages, reference_destinations) with ordinality r(message, destination, element)
        cross join lateral (
            select case
                when r.message is null or r.message not between 1 and v_count then
                    format('there is no message %s, the call has %s', coalesce(r.message::text, 'null'), v_count)
                when r.destination is null then 'the destination is null'
                when octet_length(r.destination) not between 1 and 255 then
                    format('the destination has %s bytes, allowed are 1 to 255', octet_length(r.destination))
            end as problem
        ) p
        where p.problem is not null
        order by r.element
        limit 1;
        if v_problem is not null then
            raise exception 'reference % : %', v_element, v_problem using errcode = '22023';
        end if;
        select r.message, count(*) into v_element, v_length
        from unnest(reference_messages) r(message) group by r.message having count(*) > 63 order by r.message limit 1;
        if v_element is not null then
            raise exception 'element % (message %): it has % destinations, allowed are 64', v_element,
                message_ids[v_element], v_length + 1 using errcode = '22023';
        end if;
    end if;
end
$$;
