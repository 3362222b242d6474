-- heartbeat: registers a worker that speaks SQL, or renews its lease; nothing is handed out and nothing moves.
-- in: as process_work_batch; p_owns: a new one may take partitions, and does so from its first claim on (false: it only
--     stores, for good). One that has claimed and then only says that it lives keeps what it has: end_work gives it back
-- out: lease_lost (as there), lease_until, partitions (held)
-- locks: as wh_begin_work    cost: one row
create or replace function @schema@.heartbeat(
    p_instance_id uuid, p_service_name text, p_host_name text default '', p_process_id int4 default 0,
    p_lease_seconds int4 default 30, p_owns bool default true,
    out lease_lost bool, out lease_until timestamptz, out partitions int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_incarnation int4;
begin
    v_incarnation := wh_begin_work(p_instance_id, coalesce(p_service_name, ''), p_host_name || ':' || p_process_id,
        p_lease_seconds * 1000::int8, case when p_owns then null else false end);
    lease_lost := v_incarnation is null;
    select i.lease_until into lease_until from wh_instance i where i.number = v_incarnation;
    partitions := (select count(*) from wh_partition p where p.owner = v_incarnation);
end
$$;
