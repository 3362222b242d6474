-- rebase: after a logical restore, a copy of the database or pg_upgrade, makes the installation this server's own. The
-- transaction ids in it were given elsewhere: what the cursors had resolved is taken out of the log by them for the
-- last time, what is pending is written anew under an id of this server, in its old order, and everybody begins again.
-- in: p_force: also where server and database are those of the installation (restored in place)
-- out: done (false: not needed), generation, pending (references in the log), parked (lanes), scheduled, dead_letters
-- errors: 55006 if an instance still works here
-- locks: the tables of the outbox, ACCESS EXCLUSIVE (run it with a lock_timeout and try again)
-- keeps: numbers, versions, positions, parked lanes, scheduled messages, dead letters and what subscriptions have read as
--     they are. A message stored here since the restore counts as pending, whatever the old cursors say of its transaction id.
-- the one exception to "no row of the log is ever deleted": nobody reads it meanwhile
-- cost: the log, and one pass over the event store (for its highest position)
create or replace function @schema@.rebase(
    p_force bool, out done bool, out generation int4, out pending int8, out parked int8, out scheduled int8,
    out dead_letters int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
#variable_conflict use_column
declare
    v_server int8;
    v_other_server bool;
    v_instance text;
    v_xid int8;
    v_position int8;
    v_sequence record;
    v_last int8;
begin
    lock table wh_installation in exclusive mode;
    lock table wh_log, wh_outbox, wh_event_store, wh_scheduled, wh_partition, wh_cursor, wh_instance, wh_parked,
        wh_parked_reference, wh_dead_letter, wh_stream, wh_segment, wh_rotation, wh_inspection,
        wh_handed_out, wh_worker_watch, wh_subscription, wh_subscription_member, wh_subscription_partition
        in access exclusive mode;
    select c.system_identifier into v_server from pg_catalog.pg_control_system() c;
    select i.system_identifier <> v_server, i.generation into strict v_other_server, generation from wh_installation i;
    done := false;
    if not p_force and (select c.fits from check_installation() c) then
        return;
    end if;
    if not v_other_server then
        select format('%s (%s, incarnation %s)', i.instance_name, i.service_name, i.number) into v_instance
        from wh_instance i where i.state = 0 and i.lease_until > clock_timestamp() order by i.number limit 1;
        if v_instance is not null and (select c.fits from check_installation() c) then
            raise exception 'instance % works here: stop it first', v_instance using errcode = '55006';
        end if;
    end if;

    v_xid := pg_current_xact_id()::text::int8;
    with old as (
        select l.*, v_other_server and l.xid & 4294967295 = l.xmin::text::int8 as born_here from wh_log l
    ), gone as (
        delete from wh_log
    ), resolved as materialized (
        select r.partition, r.base, r.cursor from wh_resolved r
    )
    insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq, version, lane_id,
        destination)
    select o.position, v_xid, 0, o.segment, false, k.partition, k.destination_index, k.stream_seq, k.version, k.lane_id,
        o.destination
    from old o
    cross join lateral (
        select array_agg(u.partition order by u.turn) as partition,
            array_agg(u.destination_index order by u.turn) as destination_index,
            array_agg(u.stream_seq order by u.turn) as stream_seq, array_agg(u.version order by u.turn) as version,
            array_agg(u.lane_id order by u.turn) as lane_id
        from unnest(o.partition, o.destination_index, o.stream_seq, o.version, o.lane_id)
            with ordinality u(partition, destination_index, stream_seq, version, lane_id, turn)
        join resolved r on r.partition = u.partition
        -- Words to owners are left out: whoever begins anew finds what they were about beside the log.
        where u.stream_seq > 0
            and (o.born_here
                or not pg_visible_in_snapshot(o.xid::text::xid8, r.base)
                and not pg_visible_in_snapshot(o.xid::text::xid8, r.cursor))
    ) k
    where k.partition is not null
    order by o.position;

    -- What gives numbers: some ways to copy leave sequences behind.
    select greatest(
        (select max(e.position) from wh_event_store e), (select max(o.position) from wh_outbox o),
        (select max(l.position) from wh_log l), pg_sequence_last_value('wh_position'::regclass), 0) into v_position;
    perform setval('wh_position', v_position + 4096);
    for v_sequence in
        select s.name, pg_get_serial_sequence(s.name, s.key) as sequence, s.key
        from (values ('wh_instance', 'number'), ('wh_cursor', 'number'), ('wh_dead_letter', 'dead_letter_id'),
            ('wh_scheduled', 'scheduled_id'), ('wh_subscription', 'subscription')) s(name, key)
    loop
        execute format('select max(%I) from %I', v_sequence.key, v_sequence.name) into v_last;
        v_last := greatest(v_last, pg_sequence_last_value(v_sequence.sequence::regclass));
        if v_last is not null then
            perform setval(v_sequence.sequence, v_last);
        end if;
    end loop;

    -- Nothing is resolved but what is not in the log any more.
    update wh_partition set base = '1:1:', owner = null, ownership = 0, fence = wh_partition.fence + 1;
    delete from wh_cursor;
    delete from wh_instance;
    delete from wh_rotation;
    delete from wh_handed_out;
    delete from wh_worker_watch;
    update wh_inspection set inspector = 0, inspected_at = '-infinity';
    delete from wh_epoch;
    insert into wh_epoch default values;
    -- What subscriptions have read goes by the old ids for what is stored now, and begins anew for what comes. One that
    -- had not read everything from before the rebase before reads again what it had of that.
    delete from wh_subscription_member;
    update wh_subscription_partition p
    set owner = null, fence = p.fence + 1, floor = v_position + 4095, resolved = '1:1:', target = null, target_floor = 0,
        position = 0, before_from = case when p.before_from >= i.rebased_position then i.rebased_position
            else greatest(p.before_from, case when p.target is null then 0 else least(p.position, i.rebased_position) end)
        end,
        before_resolved = case when p.before_from >= i.rebased_position then p.resolved else '1:1:' end,
        before_target = case when p.before_from >= i.rebased_position then p.target end,
        before_position = case when p.before_from >= i.rebased_position then p.position else 0 end,
        before_is_foreign = v_other_server
    from wh_installation i;
    update wh_installation i
    set system_identifier = v_server, generation = i.generation + 1, rebased_position = v_position + 4095,
        database_oid = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
    returning i.generation into generation;

    done := true;
    select coalesce(sum(cardinality(l.partition)), 0) into pending from wh_log l;
    select count(*) into parked from wh_parked;
    select count(*) into scheduled from wh_scheduled;
    select count(*) into dead_letters from wh_dead_letter;
end
$$;
