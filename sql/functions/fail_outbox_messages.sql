-- fail_outbox_messages: the failures of process_work_batch alone, and the cursor behind them.
-- in: p_instance_id (registered); the rest: see wh_fail_work
-- out: lease_lost (then nothing was written), failed, dead, unknown
-- locks: as process_work_batch    cost: as process_work_batch
create or replace function @schema@.fail_outbox_messages(
    p_instance_id uuid, p_message_ids uuid[], p_destinations text[] default null, p_reasons int4[] default null,
    p_errors text[] default null, p_attempts_max int4 default 10, p_retry_base_ms int8 default 30000,
    p_retry_cap_ms int8 default 300000, p_lease_seconds int4 default 30, p_hold_destinations text[] default '{}',
    out lease_lost bool, out failed int4, out dead int4, out unknown int4)
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
        select f.* into failed, dead, unknown
        from wh_fail_work(v_incarnation, p_message_ids, p_destinations, p_reasons, p_errors, false, p_attempts_max,
            p_retry_base_ms, p_retry_cap_ms, p_hold_destinations) f;
        perform wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, 0, 1, 1);
    end if;
end
$$;
