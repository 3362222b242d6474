-- wh_enter_service: before an incarnation owns partitions: the others that do are of the same service, and it stays so
-- until this transaction ends.
-- in: p_service_name    out: nothing
-- errors: CL008 if another service's incarnations own partitions of this schema: what one service stores, the other's
--     transport would publish
-- locks: registrations of owners (before any fence): two services that start together must not both find nobody
-- cost: a pass over the instances
create or replace function @schema@.wh_enter_service(p_service_name text) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_other text;
begin
    perform pg_advisory_xact_lock(wh_lock_class(6), 1);
    select i.service_name into v_other
    from wh_instance i
    where i.state = 0 and i.service_name <> p_service_name and i.lease_until > clock_timestamp()
        and coalesce(i.owns, exists (select from wh_partition p where p.owner = i.number))
    order by i.number limit 1;
    if found then
        raise exception 'the partitions of this schema belong to the service %: service % cannot own any', v_other,
            p_service_name
            using errcode = 'CL008', hint = 'Give each service a schema of its own, or let this one only store.';
    end if;
end
$$;
