-- renew_lease: another heartbeat and a new end of the lease, only while alive and not expired.
-- in: p_incarnation, p_lease_ms    out: false: dead for ever    locks: its own row
-- cost: one row: what an idle process costs every quarter of a lease
create or replace function @schema@.renew_lease(p_incarnation int4, p_lease_ms int8) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    update wh_instance i
    set counter = i.counter + 1, lease_until = clock_timestamp() + p_lease_ms * interval '1 millisecond'
    where i.number = p_incarnation and i.state = 0 and i.lease_until > clock_timestamp();
    return found;
end
$$;
