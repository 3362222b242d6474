-- leave_subscription: a member goes, and gives up what it has where it stands.
-- in: p_subscription, p_incarnation    out: how many partitions it gave up
-- locks: rows of its partitions    cost: an update of each
create or replace function @schema@.leave_subscription(p_subscription int4, p_incarnation int4) returns int4
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_count int4;
begin
    delete from wh_subscription_member m where m.subscription = p_subscription and m.incarnation = p_incarnation;
    update wh_subscription_partition p set owner = null, fence = p.fence + 1, updated_at = clock_timestamp()
    where p.subscription = p_subscription and p.owner = p_incarnation;
    get diagnostics v_count = row_count;
    perform pg_notify(wh_subscription_channel(), p_subscription::text);
    return v_count;
end
$$;
