-- register_instance: a new incarnation. Its session lock says that it is alive, for as long as the connection is.
-- in: p_id (made by the process), p_service_name, p_instance_name, p_lease_ms, p_shards
-- out: number, partition_count
-- locks: "alive" of the incarnation, for the session, before its row can be seen: who sees the row and gets the
--     lock may mark it dead. Needs a direct connection
-- refused with CL002 where the installation stems from another server (copied or restored): see `corelane rebase`
create or replace function @schema@.register_instance(
    p_id uuid, p_service_name text, p_instance_name text, p_lease_ms int8, p_shards int4,
    out "number" int4, out partition_count int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_stored int8;
    v_actual constant int8 := (select s.system_identifier from pg_control_system() s);
begin
    select i.system_identifier, i.partition_count into v_stored, partition_count from wh_installation i;
    if v_stored is distinct from v_actual then
        raise exception 'this schema was installed on server %, this is server %: transaction ids do not carry over',
            v_stored, v_actual
            using errcode = 'CL002', hint = 'Stop all instances and run `corelane rebase`.';
    end if;
    insert into wh_instance as i (id, service_name, instance_name, lease_until, shards)
    values (p_id, p_service_name, p_instance_name, clock_timestamp() + p_lease_ms * interval '1 millisecond', p_shards)
    returning i.number into "number";
    perform pg_advisory_lock(wh_lock_class(4), "number");
end
$$;
