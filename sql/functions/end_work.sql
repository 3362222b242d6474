-- end_work: a worker's clean end: its partitions are free at once, and its id is used up.
-- in: p_instance_id    out: whether it was alive
-- what is in hand and undecided is published by whoever follows: report what was published before
-- locks: its fence (exclusively)    cost: as deregister_instance
create or replace function @schema@.end_work(p_instance_id uuid) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_number int4;
    v_alive bool;
begin
    select i.number into v_number from wh_instance i where i.id = p_instance_id and not i.direct and i.shards = 1;
    if not found then
        return false;
    end if;
    perform pg_advisory_xact_lock(wh_lock_class(3), v_number);
    v_alive := exists (select from wh_instance i where i.number = v_number and i.state = 0);
    if v_alive then
        perform wh_hand_out(v_number, 1000, 0, 1, 1);
    end if;
    perform deregister_instance(v_number);
    delete from wh_handed_out h where h.incarnation = v_number;
    return v_alive;
end
$$;
