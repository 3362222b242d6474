-- maintain_work: one bounded step of maintenance for workers that speak SQL, where no engine runs beside them: call it
-- each minute, and again at once while it answers `more`. Dead letters are inspect_work's.
-- in: p_instance_id (registered)    out: lease_lost, truncated, rotated, more: see perform_maintenance
-- locks: as wh_begin_work and perform_maintenance    cost: as perform_maintenance
create or replace function @schema@.maintain_work(
    p_instance_id uuid, p_lease_seconds int4 default 30,
    out lease_lost bool, out truncated int4, out rotated bool, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_incarnation int4;
begin
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select m.truncated, m.rotated, m.more into truncated, rotated, more from perform_maintenance(v_incarnation) m;
    end if;
end
$$;
