-- complete_outbox_messages: the completions of process_work_batch alone, and the cursor behind them.
-- in: p_instance_id (registered); p_message_ids, p_destinations, p_statuses: see wh_complete_work
-- out: lease_lost (then nothing was written), completed, returned, unknown
-- locks: as process_work_batch    cost: as process_work_batch
create or replace function @schema@.complete_outbox_messages(
    p_instance_id uuid, p_message_ids uuid[], p_destinations text[] default null, p_statuses int4[] default null,
    p_lease_seconds int4 default 30, out lease_lost bool, out completed int4, out returned int4, out unknown int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_incarnation int4;
begin
    perform wh_require('length of p_message_ids', coalesce(cardinality(p_message_ids), 0), 0, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select c.* into completed, returned, unknown
        from wh_complete_work(v_incarnation, p_message_ids, p_destinations, p_statuses) c;
        perform wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, 0, 1, 1);
    end if;
end
$$;
