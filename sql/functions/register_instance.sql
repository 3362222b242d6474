-- register_instance: a new incarnation. Its session lock says that it is alive, for as long as the connection is.
-- in: p_id (made by the process), p_service_name, p_instance_name, p_lease_ms, p_shards
-- out: number, partition_count
-- locks: "alive" of the incarnation, for the session, before its row can be seen: who sees the row and gets the
--     lock may mark it dead. Needs a direct connection
-- cost: one row, and the server's control file
-- refused with CL002 where the installation stems from elsewhere (copied or restored): see check_installation
create or replace function @schema@.register_instance(
    p_id uuid, p_service_name text, p_instance_name text, p_lease_ms int8, p_shards int4,
    out "number" int4, out partition_count int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_why_not text;
begin
    select c.why_not, c.partition_count into v_why_not, partition_count from check_installation() c;
    if v_why_not is not null then
        raise exception '%', v_why_not using errcode = 'CL002';
    end if;
    insert into wh_instance as i (id, service_name, instance_name, lease_until, shards)
    values (p_id, p_service_name, p_instance_name, clock_timestamp() + p_lease_ms * interval '1 millisecond', p_shards)
    returning i.number into "number";
    perform pg_advisory_lock(wh_lock_class(4), "number");
end
$$;
