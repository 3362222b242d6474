-- store_shard_messages_1: store_shard_messages as a program of schema version 1 calls it, which sends the streams and
-- the references' columns as well, though the rows tell them. Goes at the earliest with schema version 3.
-- in: as store_shard_messages; the streams (p_stream_id …, in the order of their first rows) and what a row or a
--     reference says of its stream (p_row_stream, p_log_stream) are not looked at; a reference is found among the rows
--     by its lane and number (p_log_lane, p_log_seq)
-- out: as store_shard_messages    locks: as store_shard_messages    cost: as that, and a join of references and rows
create or replace function @schema@.store_shard_messages(
    p_incarnation int4, p_shard int2, p_flush int8, p_ownership int8,
    p_read_xmax int8, p_read_listed int8[], p_epoch uuid,
    p_partitions int4[],
    p_stream_id uuid[], p_stream_partition int4[], p_stream_last_seq int8[], p_stream_last_version int8[],
    p_known bool, p_events int4, p_messages int4,
    p_kind int2[], p_row_stream int4[], p_stream_seq int8[], p_version int8[], p_span_id int8[], p_lane_id uuid[],
    p_message_id uuid[], p_correlation_id uuid[], p_causation_id uuid[], p_trace_id uuid[], p_partition int4[],
    p_trace_flags int2[], p_type_name text[], p_content_type text[], p_metadata bytea[], p_payload bytea[],
    p_due timestamptz[], p_scheduled_destination_end int4[], p_scheduled_destination text[],
    p_log_end int4[], p_log_owned bool[], p_log_dictionary_end int4[], p_dictionary text[],
    p_log_partition int4[], p_log_destination int2[], p_log_seq int8[], p_log_version int8[], p_log_lane uuid[],
    p_log_stream int4[],
    out busy uuid[], out xid int8, out epoch uuid, out "position" int8, out owned bool, out is_foreign bool,
    out last_seq int8[], out last_version int8[])
language sql volatile
as $$
    select s.* from @schema@.store_shard_messages(p_incarnation, p_shard, p_flush, p_ownership, p_read_xmax,
        p_read_listed, p_epoch, p_partitions, p_known, p_events, p_messages, p_kind, p_stream_seq, p_version, p_span_id,
        p_lane_id, p_message_id, p_correlation_id, p_causation_id, p_trace_id, p_partition, p_trace_flags, p_type_name,
        p_content_type, p_metadata, p_payload, p_due, p_scheduled_destination_end, p_scheduled_destination, p_log_end,
        p_log_owned, p_log_dictionary_end, p_dictionary,
        (select coalesce(array_agg(r.turn::int4 order by l.turn), '{}')
            from unnest(p_log_lane, p_log_seq) with ordinality l(lane_id, seq, turn)
            join unnest(p_lane_id, p_stream_seq, p_kind) with ordinality r(lane_id, seq, kind, turn)
                on r.lane_id = l.lane_id and r.seq = l.seq and r.kind < 4),
        p_log_destination) s
$$;
