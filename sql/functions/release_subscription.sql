-- release_subscription: gives up partitions where they stand (checkpoint_subscription before, or their events come again).
-- in: p_subscription, p_incarnation; p_partitions (those that it does not own are passed over)
-- out: how many    locks: rows of the partitions    cost: an update of each
create or replace function @schema@.release_subscription(
    p_subscription int4, p_incarnation int4, p_partitions int4[]) returns int4
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_count int4;
begin
    update wh_subscription_partition p set owner = null, fence = p.fence + 1, updated_at = clock_timestamp()
    where p.subscription = p_subscription and p.owner = p_incarnation and p.partition = any (p_partitions);
    get diagnostics v_count = row_count;
    if v_count > 0 then
        perform pg_notify(wh_subscription_channel(), p_subscription::text);
    end if;
    return v_count;
end
$$;
