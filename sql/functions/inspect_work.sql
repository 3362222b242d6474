-- inspect_work: inspect for workers that speak SQL, where no engine runs beside them: deletes dead letters whose time is
-- over, and looks for what waits longer than it should. Call it each minute beside maintain_work.
-- in: p_instance_id (registered); p_dead_letters_days: dead letters that are older go (0: none ever goes), the same with
--     all that inspect; p_unpublished_ms, p_stuck_ms: see wh_sentinel
-- out: lease_lost; the rest as inspect: inspected is false while it is another's turn
-- errors: 22023 for what is out of its range, by name
-- locks: as wh_begin_work and inspect    cost: as inspect
create or replace function @schema@.inspect_work(
    p_instance_id uuid, p_dead_letters_days int4, p_unpublished_ms int8 default 60000, p_stuck_ms int8 default 3600000,
    p_lease_seconds int4 default 30,
    out lease_lost bool, out inspected bool, out dead_letters_trimmed int4, out unpublished int4,
    out unpublished_age_ms int8, out overdue int4, out stuck int4, out stuck_age_ms int8, out held int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_incarnation int4;
begin
    perform wh_require('p_dead_letters_days', p_dead_letters_days, 0, 36500);
    perform wh_require('p_unpublished_ms', p_unpublished_ms, 1, 31536000000);
    perform wh_require('p_stuck_ms', p_stuck_ms, 1, 31536000000);
    v_incarnation := wh_begin_work(p_instance_id, null, null, p_lease_seconds * 1000::int8, false);
    lease_lost := v_incarnation is null;
    if not lease_lost then
        select i.inspected, i.dead_letters_trimmed, i.unpublished, i.unpublished_age_ms, i.overdue, i.stuck,
            i.stuck_age_ms, i.held
        into inspected, dead_letters_trimmed, unpublished, unpublished_age_ms, overdue, stuck, stuck_age_ms, held
        from inspect(v_incarnation, p_dead_letters_days, p_unpublished_ms, p_stuck_ms) i;
    end if;
end
$$;
