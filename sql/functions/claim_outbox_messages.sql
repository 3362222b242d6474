-- claim_outbox_messages: the claims of process_work_batch alone: what a worker that speaks SQL is to publish next.
-- in: p_instance_id (registered), and bounds as there; p_again: also what is in hand already
-- out: a row a message and destination, by position; none too if there is nothing
-- lease lost: nothing, for ever: heartbeat says so
-- locks: as process_work_batch    cost: as process_work_batch
create or replace function @schema@.claim_outbox_messages(
    p_instance_id uuid, p_lease_seconds int4 default 30, p_max_streams int4 default 1000, p_max_rows int4 default 1000,
    p_max_rows_per_stream int4 default 100, p_again bool default false)
returns table (
    message_id uuid, destination text, stream_id uuid, stream_seq int8, version int8, "position" int8,
    "partition" int4, fence int8, attempts int4, status int4, flags int4, type_name text, content_type text,
    payload bytea, metadata bytea, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8, trace_flags int2,
    stored_at timestamptz)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_incarnation int4;
    v_handed_at timestamptz;
begin
    perform wh_require('p_max_streams', p_max_streams, 1, 1000000);
    perform wh_require('p_max_rows', p_max_rows, 1, 10000);
    perform wh_require('p_max_rows_per_stream', p_max_rows_per_stream, 1, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, true);
    if v_incarnation is null then
        -- Not an exception: it would take back that the partitions are free.
        return;
    end if;
    select h.handed_at into v_handed_at
    from wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, p_max_streams, p_max_rows, p_max_rows_per_stream) h;
    return query select w.* from wh_work_in_hand(v_incarnation, v_handed_at, p_again) w;
end
$$;
