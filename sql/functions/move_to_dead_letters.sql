-- move_to_dead_letters: messages in hand that are not to be tried again, whatever the reason; their streams go on.
-- in: p_instance_id (registered); p_message_ids; p_destinations (null: every one in hand); p_reasons (the reference's
--     numbers; null: 99); p_errors
-- out: lease_lost (then nothing was written), dead, unknown
-- locks: as process_work_batch    cost: as process_work_batch
create or replace function @schema@.move_to_dead_letters(
    p_instance_id uuid, p_message_ids uuid[], p_destinations text[] default null, p_reasons int4[] default null,
    p_errors text[] default null, p_lease_seconds int4 default 30,
    out lease_lost bool, out dead int4, out unknown int4)
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
        select f.dead, f.unknown into dead, unknown
        from wh_fail_work(v_incarnation, p_message_ids, p_destinations, p_reasons, p_errors, true, 1, 0, 0, '{}') f;
        perform wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, 0, 1, 1);
    end if;
end
$$;
