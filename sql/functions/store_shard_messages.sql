-- store_shard_messages: a shard's flush. One call, one transaction, one commit; the owner's door (callers in any
-- language use store_outbox_messages).
-- in: who writes: p_incarnation, p_shard, p_flush (never given twice in the incarnation), p_ownership
--     what the shard's reader has read: p_read_xmax, p_read_listed, in the life p_epoch of the server (null: any);
--         in another one the transaction ids mean others, and there is taken to be another writer
--     p_partitions: partitions of all rows, ascending, without doubles
--     p_known: the last numbers of all streams are known, so the rows have their final ones; else those of unknown
--         streams count from 1
--     rows: p_kind (0 message, 1 event, 2 message without stream; + 4: scheduled; 9: an event of which its caller
--         expects the version that stands in p_version; null: all are events), columns, null where no row has a value;
--         p_due null where nothing is scheduled
--     log: p_log_end / p_log_dictionary_end (last reference / name of each log row), p_log_owned, p_dictionary,
--         of each reference p_log_row (1-based; null: one reference a row, in order) and p_log_destination (1-based
--         into the log row's names; null: all the first)
-- out: busy: streams that are locked elsewhere; if not null, nothing was written and all else is null, unless they are
--         streams of which a caller expects another version than they have: then last_version says which they have
--     xid, epoch, position (row i has position + i - 1), owned, is_foreign
--     last_seq, last_version: looked-up numbers of all streams that get numbers, in the order of their first rows;
--         null if those given were used
-- locks: fence of the incarnation (shared), the shard's flushes (exclusive), its turn in each of its partitions
--     (exclusive, ascending: other shards' flushes, also of other incarnations, are waited for: each is one statement;
--     no caller holds one), then by trying, never waiting: its partitions (exclusive), or where one is held elsewhere: the partition (shared) and its streams (exclusive),
--     at most 256. Whatever is read, is read in a later statement than the locks.
-- numbers: taken as they are where all streams are known, the ownership is right and no other writer's log row is
--     outside what the reader has read; else looked up under the locks. A wrong one fails the call by 23505: there
--     is no `on conflict` on numbers. So an expected version needs a look only where numbers are looked up.
-- cost: two statements of constant size, then one insert a table: no look-up a row on the usual way. Objects are
--     named with their schema instead of by search_path; the planner settings keep a plan that was made on an
--     empty table from walking a full one. Arrays unnested in the select list run in step without a tuplestore a
--     column, which `from unnest(…)` has: 10 to 25 % less CPU. Each array costs its elements twice more on the way
--     in (received, copied), so what can be derived from another is not sent; and rows of the log go into their
--     segment's table, without the routing.
create or replace function @schema@.store_shard_messages(
    p_incarnation int4, p_shard int2, p_flush int8, p_ownership int8,
    p_read_xmax int8, p_read_listed int8[], p_epoch uuid,
    p_partitions int4[],
    p_known bool, p_events int4, p_messages int4,
    p_kind int2[], p_stream_seq int8[], p_version int8[], p_span_id int8[], p_lane_id uuid[],
    p_message_id uuid[], p_correlation_id uuid[], p_causation_id uuid[], p_trace_id uuid[], p_partition int4[],
    p_trace_flags int2[], p_type_name text[], p_content_type text[], p_metadata bytea[], p_payload bytea[],
    p_due timestamptz[], p_scheduled_destination_end int4[], p_scheduled_destination text[],
    p_log_end int4[], p_log_owned bool[], p_log_dictionary_end int4[], p_dictionary text[],
    p_log_row int4[], p_log_destination int2[],
    out busy uuid[], out xid int8, out epoch uuid, out "position" int8, out owned bool, out is_foreign bool,
    out last_seq int8[], out last_version int8[])
language plpgsql volatile
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_partition_class constant int4 := @schema@.wh_lock_class(1);
    v_contested int4[];
    v_refused int4[];
    v_segment int2;
    v_owned bool;
    v_foreign bool;
    v_given_up bool;
    v_floor int8 := 0;
    v_xid int8;
    v_position int8;
    v_log_partition int4[];
    v_log_seq int8[];
    v_log_version int8[];
    v_log_lane uuid[];
    v_conflict_version int8[];
    v_begin int4 := 1;
    v_name int4 := 1;
begin
    perform pg_advisory_xact_lock_shared(@schema@.wh_lock_class(3), p_incarnation);
    perform pg_advisory_xact_lock(@schema@.wh_lock_class(7), @schema@.wh_flush_key(p_incarnation, p_shard));
    perform pg_advisory_xact_lock(@schema@.wh_lock_class(5), p) from unnest(p_partitions) p;

    select array_agg(p) into v_refused
    from unnest(p_partitions) p
    where not pg_try_advisory_xact_lock(v_partition_class, p);
    if v_refused is not null then
        -- Somebody works in these partitions: find out on which of our streams. Rows without a stream meet nobody.
        v_contested := v_refused;
        select array_agg(p) into v_refused
        from unnest(v_contested) p
        where not pg_try_advisory_xact_lock_shared(v_partition_class, p);
        select array_agg(s.id) into busy
        from (
            select s.id, coalesce(s.partition = any (v_refused), false) as refused,
                row_number() over (order by @schema@.wh_stream_key(s.id)) as turn
            from (
                select r.lane_id as id, min(r.partition) as partition
                from unnest(p_kind, p_lane_id, p_partition) r(kind, lane_id, partition)
                where coalesce(r.kind, 1) in (0, 1, 9) and r.partition = any (v_contested)
                group by r.lane_id
            ) s
        ) s
        where s.refused or s.turn > 256
            or not pg_try_advisory_xact_lock(@schema@.wh_lock_class(2), @schema@.wh_stream_key(s.id));
        if busy is not null then
            return;
        end if;
    end if;

    -- A later statement than the locks.
    select (select e.token from @schema@.wh_epoch e),
        coalesce((select i.state = 0 and i.ownership = p_ownership from @schema@.wh_instance i
            where i.number = p_incarnation), false),
        (select s.current from @schema@.wh_segment s),
        exists (select from @schema@.wh_flush_given_up g
            where g.incarnation = p_incarnation and g.shard = p_shard and g.flush_number >= p_flush),
        exists (select from @schema@.wh_log l where not l.owned and l.xid >= p_read_xmax)
            or (cardinality(p_read_listed) > 0
                and exists (select from @schema@.wh_log l where not l.owned and l.xid = any (p_read_listed)))
    into epoch, v_owned, v_segment, v_given_up, v_foreign;
    if v_given_up then
        raise exception 'flush % was looked up, not found, and given up', p_flush using errcode = 'CL004';
    end if;
    owned := v_owned;
    if epoch is null then
        epoch := @schema@.wh_epoch_token();
    end if;
    v_foreign := v_foreign or coalesce(p_epoch <> epoch, false);
    is_foreign := v_foreign;

    if not p_known or not v_owned or v_foreign then
        with r as materialized (
            select generate_series(1, cardinality(p_lane_id)) as turn, unnest(p_kind) as kind,
                unnest(p_lane_id) as lane_id, unnest(p_stream_seq) as seq, unnest(p_version) as version
        ),
        s as materialized (
            select r.lane_id as id, min(r.turn) as turn, min(r.seq) - 1 as assumed_seq,
                min(r.version) filter (where r.version > 0) - 1 as assumed_version,
                coalesce(bool_or(r.kind = 9), false) as is_expected
            from r where coalesce(r.kind, 1) in (0, 1, 9) group by r.lane_id
        ),
        n as materialized (
            select s.id, s.turn, s.assumed_seq, s.assumed_version, coalesce(e.version, 0) as version,
                s.is_expected and coalesce(e.version, 0) <> s.assumed_version as is_conflict,
                greatest(coalesce(e.stream_seq, 0), o.stream_seq, coalesce(c.last_seq, 0)) as seq
            from s
            left join lateral (
                select e.stream_seq, e.version from @schema@.wh_event_store e
                where e.stream_id = s.id order by e.version desc limit 1
            ) e on true
            cross join lateral (
                select greatest(
                    (select o.stream_seq from @schema@.wh_outbox_0 o where o.lane_id = s.id
                        order by o.stream_seq desc limit 1),
                    (select o.stream_seq from @schema@.wh_outbox_1 o where o.lane_id = s.id
                        order by o.stream_seq desc limit 1),
                    (select o.stream_seq from @schema@.wh_outbox_2 o where o.lane_id = s.id
                        order by o.stream_seq desc limit 1), 0) as stream_seq
            ) o
            left join @schema@.wh_stream c on c.stream_id = s.id
        ),
        numbered as (
            select r.turn, r.seq + coalesce(n.seq - n.assumed_seq, 0) as seq,
                case when r.version > 0 then r.version + n.version - n.assumed_version else 0 end as version
            from r left join n on n.id = r.lane_id and coalesce(r.kind, 1) in (0, 1, 9)
        )
        select coalesce(found.seq, '{}'), coalesce(found.version, '{}'), rows.seq, rows.version, found.conflict,
            found.conflict_version
        into last_seq, last_version, p_stream_seq, p_version, busy, v_conflict_version
        from (
            select array_agg(n.seq order by n.turn) as seq, array_agg(n.version order by n.turn) as version,
                array_agg(n.id order by n.turn) filter (where n.is_conflict) as conflict,
                array_agg(n.version order by n.turn) filter (where n.is_conflict) as conflict_version
            from n
        ) found, (
            select array_agg(d.seq order by d.turn) as seq, array_agg(d.version order by d.turn) as version
            from numbered d
        ) rows;
        if busy is not null then
            last_seq := null;
            last_version := v_conflict_version;
            return;
        end if;
    end if;

    -- In this order: see wh_draw_position.
    if pg_current_xact_id_if_assigned() is null then
        v_floor := coalesce(pg_sequence_last_value('@schema@.wh_position'), 0);
    end if;
    v_xid := pg_current_xact_id()::text::int8;
    v_position := nextval('@schema@.wh_position');
    xid := v_xid;
    "position" := v_position;

    if p_events > 0 then
        insert into @schema@.wh_event_store (position, stream_seq, version, xid, span_id, stored_at, stream_id,
            message_id, correlation_id, causation_id, trace_id, partition, trace_flags, type_name, content_type,
            metadata, payload)
        select v_position + r.turn - 1, r.stream_seq, r.version, v_xid, r.span_id, now(), r.lane_id,
            r.message_id, r.correlation_id, r.causation_id, r.trace_id, r.partition, r.trace_flags, r.type_name,
            r.content_type, r.metadata, r.payload
        from (
            select generate_series(1, cardinality(p_lane_id)) as turn, unnest(p_kind) as kind,
                unnest(p_stream_seq) as stream_seq, unnest(p_version) as version, unnest(p_span_id) as span_id,
                unnest(p_lane_id) as lane_id, unnest(p_message_id) as message_id,
                unnest(p_correlation_id) as correlation_id, unnest(p_causation_id) as causation_id,
                unnest(p_trace_id) as trace_id, unnest(p_partition) as partition,
                unnest(p_trace_flags) as trace_flags, unnest(p_type_name) as type_name,
                unnest(p_content_type) as content_type, unnest(p_metadata) as metadata, unnest(p_payload) as payload
        ) r
        where coalesce(r.kind, 1) in (1, 9);
    end if;
    if p_messages > 0 then
        insert into @schema@.wh_outbox (position, stream_seq, xid, span_id, stored_at, lane_id, stream_id,
            message_id, correlation_id, causation_id, trace_id, partition, trace_flags, segment, type_name,
            content_type, metadata, payload)
        select v_position + r.turn - 1, r.stream_seq, v_xid, r.span_id, now(), r.lane_id,
            case when r.kind = 0 then r.lane_id end,
            r.message_id, r.correlation_id, r.causation_id, r.trace_id, r.partition, r.trace_flags, v_segment,
            r.type_name, r.content_type, r.metadata, r.payload
        from (
            select generate_series(1, cardinality(p_lane_id)) as turn, unnest(p_kind) as kind,
                unnest(p_stream_seq) as stream_seq, unnest(p_span_id) as span_id, unnest(p_lane_id) as lane_id,
                unnest(p_message_id) as message_id, unnest(p_correlation_id) as correlation_id,
                unnest(p_causation_id) as causation_id, unnest(p_trace_id) as trace_id,
                unnest(p_partition) as partition, unnest(p_trace_flags) as trace_flags,
                unnest(p_type_name) as type_name, unnest(p_content_type) as content_type,
                unnest(p_metadata) as metadata, unnest(p_payload) as payload
        ) r
        where r.kind in (0, 2);
    end if;
    if p_due is not null then
        insert into @schema@.wh_scheduled (due, lane_id, stream_id, message_id, correlation_id, causation_id, trace_id,
            span_id, partition, trace_flags, type_name, content_type, metadata, payload, destination)
        select r.due, r.lane_id, case when r.kind = 4 then r.lane_id end, r.message_id, r.correlation_id,
            r.causation_id, r.trace_id, r.span_id, r.partition, r.trace_flags, r.type_name, r.content_type,
            r.metadata, r.payload, p_scheduled_destination[r.destination_begin + 1 : r.destination_end]
        from (
            select r.*, coalesce(lag(r.destination_end) over (order by r.turn), 0) as destination_begin
            from unnest(p_kind, p_due, p_scheduled_destination_end, p_span_id, p_lane_id, p_message_id,
                p_correlation_id, p_causation_id, p_trace_id, p_partition, p_trace_flags, p_type_name, p_content_type,
                p_metadata, p_payload)
                with ordinality r(kind, due, destination_end, span_id, lane_id, message_id, correlation_id,
                causation_id, trace_id, partition, trace_flags, type_name, content_type, metadata, payload, turn)
        ) r
        where r.kind in (4, 6);
    end if;

    if p_log_row is null then
        v_log_partition := p_partition;
        v_log_seq := p_stream_seq;
        v_log_version := p_version;
        v_log_lane := p_lane_id;
    else
        select coalesce(array_agg(p_partition[r.row] order by r.turn), '{}'),
            coalesce(array_agg(p_stream_seq[r.row] order by r.turn), '{}'),
            coalesce(array_agg(p_version[r.row] order by r.turn), '{}'),
            coalesce(array_agg(p_lane_id[r.row] order by r.turn), '{}')
        into v_log_partition, v_log_seq, v_log_version, v_log_lane
        from unnest(p_log_row) with ordinality r(row, turn);
    end if;
    if p_log_destination is null then
        p_log_destination := array_fill(1::int2, array[cardinality(v_log_lane)]);
    end if;
    -- At least one row, so that find_flush finds the flush.
    for i in 1..cardinality(p_log_end) loop
        if v_segment = 0 then
            insert into @schema@.wh_log_0 (position, xid, floor, flush_number, incarnation, shard, segment, owned,
                partition, destination_index, stream_seq, version, lane_id, destination)
            values (v_position + i - 1, v_xid, v_floor, p_flush, p_incarnation, p_shard, v_segment,
                v_owned and p_log_owned[i], v_log_partition[v_begin : p_log_end[i]],
                p_log_destination[v_begin : p_log_end[i]], v_log_seq[v_begin : p_log_end[i]],
                v_log_version[v_begin : p_log_end[i]], v_log_lane[v_begin : p_log_end[i]],
                p_dictionary[v_name : p_log_dictionary_end[i]]);
        elsif v_segment = 1 then
            insert into @schema@.wh_log_1 (position, xid, floor, flush_number, incarnation, shard, segment, owned,
                partition, destination_index, stream_seq, version, lane_id, destination)
            values (v_position + i - 1, v_xid, v_floor, p_flush, p_incarnation, p_shard, v_segment,
                v_owned and p_log_owned[i], v_log_partition[v_begin : p_log_end[i]],
                p_log_destination[v_begin : p_log_end[i]], v_log_seq[v_begin : p_log_end[i]],
                v_log_version[v_begin : p_log_end[i]], v_log_lane[v_begin : p_log_end[i]],
                p_dictionary[v_name : p_log_dictionary_end[i]]);
        else
            insert into @schema@.wh_log_2 (position, xid, floor, flush_number, incarnation, shard, segment, owned,
                partition, destination_index, stream_seq, version, lane_id, destination)
            values (v_position + i - 1, v_xid, v_floor, p_flush, p_incarnation, p_shard, v_segment,
                v_owned and p_log_owned[i], v_log_partition[v_begin : p_log_end[i]],
                p_log_destination[v_begin : p_log_end[i]], v_log_seq[v_begin : p_log_end[i]],
                v_log_version[v_begin : p_log_end[i]], v_log_lane[v_begin : p_log_end[i]],
                p_dictionary[v_name : p_log_dictionary_end[i]]);
        end if;
        v_begin := p_log_end[i] + 1;
        v_name := p_log_dictionary_end[i] + 1;
    end loop;
end
$$;
