-- renew_outbox_messages: renews a worker's lease, and says that these messages are still being worked on: a hand-over
-- waits for them for another lease.
-- in: p_instance_id (registered); p_message_ids (null: everything in hand); p_lease_seconds
-- out: lease_lost (then nothing is in hand any more), renewed (references)
-- locks: as wh_begin_work    cost: a row a reference
create or replace function @schema@.renew_outbox_messages(
    p_instance_id uuid, p_message_ids uuid[] default null, p_lease_seconds int4 default 30,
    out lease_lost bool, out renewed int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_incarnation int4;
begin
    perform wh_require('length of p_message_ids', coalesce(cardinality(p_message_ids), 0), 0, 10000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    update wh_handed_out h set handed_at = clock_timestamp()
    where h.incarnation = v_incarnation and not h.decided
        and (p_message_ids is null or h.message_id = any (p_message_ids));
    get diagnostics renewed = row_count;
end
$$;
