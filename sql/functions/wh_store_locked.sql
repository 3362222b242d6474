-- wh_store_locked: numbers messages whose streams the transaction has locked, and writes them with their log rows.
-- The part that store_outbox_messages and release_scheduled have in common.
-- in: partition_count; the rest as store_outbox_messages, checked. Those with a due time go to wh_scheduled.
-- out: as store_outbox_messages
-- locks: none of its own; called in a later statement than those it relies on
-- numbers: looked up, always; proved at isolation levels whose snapshot may be older than the locks (wh_prove_last).
--     A message without stream is number 1 of a lane of its own (wh_lane); its partition is that of its id.
-- log: not owned. At least one row a call even without a reference: it tells the owner that another has stored, and
--     rotation that there is something in the segment. References of one message stay in one row, and a row's
--     position is its first message's: so no two rows have the same.
-- cost: numbers are arrays of eight bytes an element: nothing wide is sorted or joined, however many there are
create or replace function @schema@.wh_store_locked(
    partition_count int4,
    message_ids uuid[], stream_ids uuid[], type_names text[], payloads bytea[], event_flags bool[],
    destinations text[], reference_messages int4[], reference_destinations text[],
    correlation_ids uuid[], causation_ids uuid[], trace_ids uuid[],
    span_ids int8[], trace_flags int2[], content_types text[], metadata bytea[], dues timestamptz[])
returns table (message_id uuid, partition int4, stream_seq int8, version int8, "position" int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_count constant int4 := cardinality(message_ids);
    v_has_references constant bool := coalesce(cardinality(reference_messages), 0) > 0;
    v_log_messages int4 := 180;
    v_lane uuid[];
    v_partition int4[];
    v_seq int8[];
    v_version int8[];
    v_numbered int8;
    v_events int8;
    v_stream uuid[];
    v_last_seq int8[];
    v_last_version int8[];
    v_floor int8;
    v_xid int8;
    v_draw int8[];
    v_segment int2;
begin
    if v_count = 0 then
        return;
    end if;
    with message as (
        select m.*, row_number() over in_stream as place, count(*) filter (where m.is_event) over in_stream as event_place
        from unnest(message_ids, stream_ids, event_flags, dues) with ordinality m(id, stream_id, is_event, due, turn)
        window in_stream as (partition by m.stream_id, m.due is null order by m.turn rows unbounded preceding)
    ), found as (
        select m.*, case when m.place = 1 and m.stream_id is not null and m.due is null then greatest(
                coalesce((select e.stream_seq from wh_event_store e where e.stream_id = m.stream_id
                    order by e.version desc limit 1), 0),
                coalesce((select o.stream_seq from wh_outbox_0 o where o.lane_id = m.stream_id
                    order by o.stream_seq desc limit 1), 0),
                coalesce((select o.stream_seq from wh_outbox_1 o where o.lane_id = m.stream_id
                    order by o.stream_seq desc limit 1), 0),
                coalesce((select o.stream_seq from wh_outbox_2 o where o.lane_id = m.stream_id
                    order by o.stream_seq desc limit 1), 0),
                coalesce((select c.last_seq from wh_stream c where c.stream_id = m.stream_id), 0)
            ) end as last_seq,
            case when m.place = 1 and m.stream_id is not null and m.due is null then
                coalesce((select e.version from wh_event_store e where e.stream_id = m.stream_id
                    order by e.version desc limit 1), 0) end as last_version
        from message m
    ), numbered as (
        select f.turn, coalesce(f.stream_id, wh_lane(f.id)) as lane_id, coalesce(f.stream_id, f.id) as placed_by,
            f.last_seq, f.last_version, f.stream_id, f.due is null as is_numbered, f.is_event and f.stream_id is not null as is_event,
            case when f.due is not null then 0 when f.stream_id is null then 1
                else max(f.last_seq) over in_stream + f.place end as seq,
            case when f.is_event and f.stream_id is not null then max(f.last_version) over in_stream + f.event_place
                else 0 end as version
        from found f
        window in_stream as (partition by f.stream_id, f.due is null order by f.turn rows unbounded preceding)
    )
    select array_agg(n.lane_id order by n.turn), 
        array_agg(compute_partition(n.placed_by, partition_count) order by n.turn),
        array_agg(n.seq order by n.turn), array_agg(n.version order by n.turn),
        count(*) filter (where n.is_numbered), count(*) filter (where n.is_event),
        array_agg(n.stream_id) filter (where n.last_seq is not null),
        array_agg(n.last_seq) filter (where n.last_seq is not null),
        array_agg(n.last_version) filter (where n.last_seq is not null)
    into v_lane, v_partition, v_seq, v_version, v_numbered, v_events, v_stream, v_last_seq, v_last_version
    from numbered n;

    if v_stream is not null and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        perform wh_prove_last(v_stream, v_last_seq, v_last_version);
    end if;

    if v_numbered < v_count then
        insert into wh_scheduled (due, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id, span_id,
            partition, trace_flags, type_name, content_type, metadata, payload, destination)
        select m.due, m.lane_id, m.stream_id, m.message_id, m.correlation_id, m.causation_id, m.trace_id, m.span_id,
            m.partition, m.trace_flags, m.type_name, m.content_type, m.metadata, m.payload,
            array(select m.destination where m.destination is not null
                union select r.destination from unnest(reference_messages, reference_destinations) r(message, destination)
                where r.message = m.turn)
        from unnest(dues, v_lane, stream_ids, message_ids, correlation_ids, causation_ids, trace_ids, span_ids,
            v_partition, trace_flags, type_names, content_types, metadata, payloads, destinations)
            with ordinality m(due, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id, span_id,
            partition, trace_flags, type_name, content_type, metadata, payload, destination, turn)
        where m.due is not null;
    end if;

    if v_numbered > 0 then
        -- One draw for each 4,096 messages: the sequence steps by so many. After the locks, so that positions grow
        -- along a stream; and after the transaction's id (see wh_draw_position).
        select d.floor, d.xid, array[d.position] into v_floor, v_xid, v_draw from wh_draw_position() d;
        if v_count > 4096 then
            v_draw := v_draw || array(select nextval('wh_position') from generate_series(1, (v_count - 1) / 4096));
        end if;
        select s.current into strict v_segment from wh_segment s;

        if v_events > 0 then
            insert into wh_event_store (position, stream_seq, version, xid, span_id, stored_at, stream_id, message_id,
                correlation_id, causation_id, trace_id, partition, trace_flags, type_name, content_type, metadata,
                payload)
            select v_draw[(m.turn - 1) / 4096 + 1] + (m.turn - 1) % 4096, m.seq, m.version, v_xid, m.span_id,
                statement_timestamp(), m.stream_id, m.message_id, m.correlation_id, m.causation_id, m.trace_id,
                m.partition, m.trace_flags, m.type_name, m.content_type, m.metadata, m.payload
            from unnest(v_seq, v_version, span_ids, stream_ids, message_ids, correlation_ids, causation_ids, trace_ids,
                v_partition, trace_flags, type_names, content_types, metadata, payloads)
                with ordinality m(seq, version, span_id, stream_id, message_id, correlation_id, causation_id, trace_id,
                partition, trace_flags, type_name, content_type, metadata, payload, turn)
            where m.version > 0;
        end if;
        if v_events < v_numbered then
            insert into wh_outbox (position, stream_seq, xid, span_id, stored_at, lane_id, stream_id, message_id,
                correlation_id, causation_id, trace_id, partition, trace_flags, segment, type_name, content_type,
                metadata, payload)
            select v_draw[(m.turn - 1) / 4096 + 1] + (m.turn - 1) % 4096, m.seq, v_xid, m.span_id,
                statement_timestamp(), m.lane_id, m.stream_id, m.message_id, m.correlation_id, m.causation_id,
                m.trace_id, m.partition, m.trace_flags, v_segment, m.type_name, m.content_type, m.metadata, m.payload
            from unnest(v_seq, v_version, span_ids, v_lane, stream_ids, message_ids, correlation_ids, causation_ids,
                trace_ids, v_partition, trace_flags, type_names, content_types, metadata, payloads)
                with ordinality m(seq, version, span_id, lane_id, stream_id, message_id, correlation_id, causation_id,
                trace_id, partition, trace_flags, type_name, content_type, metadata, payload, turn)
            where m.version = 0 and m.seq > 0;
        end if;

        if v_has_references then
            select 180 / (max(r.size) + 1) into v_log_messages
            from (select count(*) as size from unnest(reference_messages) m group by m) r;
        end if;
        with reference as (
            select m.turn, m.destination
            from unnest(destinations, v_seq) with ordinality m(destination, seq, turn)
            where m.destination is not null and m.seq > 0
            union
            select r.message, r.destination
            from unnest(reference_messages, reference_destinations) r(message, destination)
            where v_has_references and v_seq[r.message] > 0
        ), placed as (
            select r.*, (dense_rank() over (order by r.turn) - 1) / v_log_messages as log_row
            from reference r
        ), named as (
            select p.*, dense_rank() over (partition by p.log_row order by p.destination) as name from placed p
        )
        insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version,
            lane_id, destination)
        select v_draw[(min(n.turn) - 1) / 4096 + 1] + (min(n.turn) - 1) % 4096, v_xid, v_floor, v_segment, false,
            array_agg(v_partition[n.turn] order by n.turn, n.name), array_agg(n.name::int2 order by n.turn, n.name),
            array_agg(v_seq[n.turn] order by n.turn, n.name), array_agg(v_version[n.turn] order by n.turn, n.name),
            array_agg(v_lane[n.turn] order by n.turn, n.name), array_agg(distinct n.destination order by n.destination)
        from named n
        group by n.log_row;
        if not found then
            insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version,
                lane_id, destination)
            values (v_draw[1], v_xid, v_floor, v_segment, false, '{}', '{}', '{}', '{}', '{}', '{}');
        end if;
    end if;

    return query
    select m.message_id, m.partition, case when m.seq > 0 then m.seq end, case when m.seq > 0 then m.version end,
        case when m.seq > 0 then v_draw[(m.turn - 1) / 4096 + 1] + (m.turn - 1) % 4096 end
    from unnest(message_ids, v_partition, v_seq, v_version) with ordinality m(message_id, partition, seq, version, turn)
    order by m.turn;
end
$$;
