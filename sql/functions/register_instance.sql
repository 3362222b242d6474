-- register_instance: a new incarnation. Its session lock says that it is alive, for as long as the connection is.
-- in: p_id (made by the process), p_service_name, p_instance_name, p_lease_ms, p_shards
--     p_owns: whether it takes partitions at all; one that only stores does not; null (not said, as by a program of the
--         version before, or not yet): it counts while it holds some
--     p_direct: the connection is the process's own, so it can hold the session lock; behind a pooler it cannot, and
--         the incarnation is taken over only when its lease ends
-- out: number, partition_count
-- locks: who is to own, one after the other (until the end of the transaction); "alive" of the incarnation, for the
--     session, before its row can be seen: who sees the row and gets the lock may mark it dead. Needs a direct connection
-- cost: one row, and the server's control file
-- refused with CL002 where the installation stems from elsewhere (copied or restored): see check_installation;
--     with CL008 if it is to own and another service does: see wh_enter_service
create or replace function @schema@.register_instance(
    p_id uuid, p_service_name text, p_instance_name text, p_lease_ms int8, p_shards int4,
    p_owns bool default null, p_direct bool default true,
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
    if p_owns then
        perform wh_enter_service(p_service_name);
    end if;
    insert into wh_instance as i (id, service_name, instance_name, lease_until, shards, owns, direct)
    values (p_id, p_service_name, p_instance_name, clock_timestamp() + p_lease_ms * interval '1 millisecond', p_shards,
        p_owns, p_direct)
    returning i.number into "number";
    if p_direct then
        perform pg_advisory_lock(wh_lock_class(4), "number");
    end if;
    if p_owns then
        perform pg_notify(wh_channel(), 'members');
    end if;
end
$$;
