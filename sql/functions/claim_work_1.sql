-- claim_work_1: claim_work as a program of schema version 1 calls it, which knows no bound on a page's streams.
-- Goes at the earliest with schema version 3.
-- in: as claim_work, without p_streams_max    out: as claim_work    locks: none    cost: as claim_work
create or replace function @schema@.claim_work(
    p_incarnation int4, p_shard int2, p_read_xmax int8, p_read_listed int8[], p_page_xmax int8, p_page_listed int8[],
    p_page_position int8, p_read_floor int8, p_page_floor int8, p_page_ceiling int8,
    p_partitions int4[], p_flushes int8[], p_rows_max int4)
returns table (
    epoch uuid, page_xmax int8, page_listed int8[], page_position int8, page_floor int8, page_ceiling int8,
    log_xid int8[], log_own_flush int8[], scheduled_in_ms int8,
    log int4, destination text, stream_seq int8, version int8, span_id int8, lane_id uuid, stream_id uuid,
    message_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, partition int4, trace_flags int2,
    type_name text, content_type text, metadata bytea, payload bytea)
language sql volatile
as $$
    select c.* from @schema@.claim_work(p_incarnation, p_shard, p_read_xmax, p_read_listed, p_page_xmax, p_page_listed,
        p_page_position, p_read_floor, p_page_floor, p_page_ceiling, p_partitions, p_flushes, p_rows_max, p_rows_max) c
$$;
