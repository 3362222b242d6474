-- wh_lock_owners: waits until the owners of these partitions have written the outcomes that are under way, and lets them
-- write none until the transaction ends. What is changed beside the log then is found by them whole.
-- in: p_partitions    out: nothing
-- errors: 40001 if the partitions go from owner to owner: run the transaction again. 55P03 after the caller's
--     lock_timeout
-- locks: fences of the owners (exclusive, ascending, waiting): their flushes and outcomes wait as well: keep it short.
--     Two such calls in one transaction can deadlock like any two transactions
-- cost: a lock an owner
create or replace function @schema@.wh_lock_owners(p_partitions int4[]) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_locked int4[] := '{}';
    v_owners int4[];
    v_owner int4;
begin
    for turn in 1..5 loop
        -- A later statement than the locks.
        select coalesce(array_agg(distinct p.owner order by p.owner), '{}') into v_owners
        from wh_partition p where p.partition = any (p_partitions) and p.owner is not null;
        if v_owners <@ v_locked then
            return;
        end if;
        foreach v_owner in array v_owners loop
            perform pg_advisory_xact_lock(wh_lock_class(3), v_owner);
        end loop;
        v_locked := v_locked || v_owners;
    end loop;
    raise exception 'the partitions change their owners: run it again' using errcode = '40001';
end
$$;
