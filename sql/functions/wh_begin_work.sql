-- wh_begin_work: what every call of a worker that speaks SQL begins with: it is found by its id, or registered, its
-- calls take turns, and its lease is renewed.
-- in: p_instance_id; p_service_name (null: it must be known), p_instance_name, p_lease_ms; p_owns: true in a call that
--     claims: it takes partitions from now on. Another call leaves that as it is; of a new one false says that it will
--     only store, for good, null that it may claim later (it has no share before, since nobody would publish it)
-- out: its incarnation's number; null: its lease has ended, or somebody has ended it. That is for ever: what it has in
--     hand may be another's by now, and must not be mistaken for what the same caller is handed later. It goes on under
--     a new id
-- errors: 22023 for an id that is not known and comes without a service, that is an engine's, or that was registered
--     to store only and now claims; those of register_instance
-- locks: registrations of owners, if it begins to own (to the end of the transaction: make the first call alone); its
--     fence, exclusively: two calls of one worker take turns, and whoever declares it dead waits for the call; its row
-- isolation: every call changes that row, so a call at a higher level that has not seen the one before fails with 40001
-- cost: one row, an update that moves in its page
create or replace function @schema@.wh_begin_work(
    p_instance_id uuid, p_service_name text, p_instance_name text, p_lease_ms int8, p_owns bool) returns int4
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_number int4;
    v_service_name text;
    v_begins bool;
    v_instance wh_instance;
begin
    if p_instance_id is null then
        raise exception 'the instance id is null: give the worker a uuid of its own each time it starts'
            using errcode = '22023';
    end if;
    perform wh_require('p_lease_seconds', p_lease_ms / 1000, 1, 3600);
    select i.number, i.service_name, p_owns and i.owns is null and not i.direct into v_number, v_service_name, v_begins
    from wh_instance i where i.id = p_instance_id;
    if not found then
        if p_service_name is null then
            raise exception 'instance % is not known: process_work_batch or heartbeat register it, with its service''s name',
                p_instance_id using errcode = '22023';
        end if;
        begin
            select r.number into v_number
            from register_instance(p_instance_id, p_service_name, p_instance_name, p_lease_ms, 1, p_owns, false) r;
        exception when unique_violation then
            -- Two first calls at once.
            select i.number, i.service_name, p_owns and i.owns is null and not i.direct
            into strict v_number, v_service_name, v_begins
            from wh_instance i where i.id = p_instance_id;
        end;
    end if;
    if v_begins then
        perform wh_enter_service(v_service_name);
    end if;
    perform pg_advisory_xact_lock(wh_lock_class(3), v_number);

    -- Later statements than the lock.
    update wh_instance i
    set counter = i.counter + 1, lease_until = clock_timestamp() + p_lease_ms * interval '1 millisecond',
        owns = case when v_begins then coalesce(i.owns, true) else i.owns end
    where i.number = v_number and i.state = 0 and i.lease_until > clock_timestamp()
    returning i.* into v_instance;
    if found then
        if v_instance.direct or v_instance.shards <> 1 then
            raise exception 'instance % is an engine''s: a worker needs an id of its own', p_instance_id
                using errcode = '22023';
        end if;
        if p_owns and not coalesce(v_instance.owns, false) then
            raise exception 'instance % was registered to store only', p_instance_id
                using errcode = '22023', hint = 'Claim under a new id.';
        end if;
        if v_begins then
            perform pg_notify(wh_channel(), 'members');
        end if;
        return v_number;
    end if;
    update wh_instance i set state = 1 where i.number = v_number and i.state = 0 and not i.direct;
    if found then
        perform wh_free_partitions(v_number);
        perform pg_notify(wh_channel(), 'members');
    end if;
    delete from wh_handed_out h where h.incarnation = v_number;
    return null;
end
$$;
