-- wh_hand_out: the last part of a worker's call: its place among the members, its reader, what it is handed, and how
-- far its cursor comes.
-- in: p_incarnation (its fence is held); p_lease_ms; p_streams_max: new streams and destinations at most (0: nothing is
--     handed out, only the cursor moves); p_rows_max: references that it may have in hand; p_stream_rows_max: of those of
--     one stream and destination, handed out at once
-- out: members; handed_at: what was handed out now bears it (wh_work_in_hand); the rest is in the tables
-- beside the log: of a lane that is due, first what is kept there, by number, and only if nothing before it is still
--     in hand, or in the log where it has not been read
-- hand-over: a partition that is another's share goes when nothing of it is in hand, or has been for longer than a lease
-- the cursor: everything that the read snapshot sees, less each transaction with an undecided reference of these
--     partitions, each that was not read to its end, and those running. At most 1,000 of them: then it ends before the
--     next. It never says less than the one before
-- scheduled messages of its partitions that are due are released first: see release_scheduled
-- locks: as wh_share_partitions, release_scheduled, settle and release_partitions
-- cost: as wh_read_undecided; a row a reference handed out
create or replace function @schema@.wh_hand_out(
    p_incarnation int4, p_lease_ms int8, p_streams_max int4, p_rows_max int4, p_stream_rows_max int4,
    out members int4, out handed_at timestamptz)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now constant timestamptz := clock_timestamp();
    v_leaving int4[] := '{}';
    v_room int4;
    v_read record;
    v_taken int4[];
    v_message uuid[];
    v_due record;
    v_open int8[];
    v_unread int8;
    v_rest int8[];
    v_xmax int8;
    v_cut int8;
    v_cursor pg_snapshot;
    v_ownership int8;
    v_gone int4[];
    v_resolved pg_snapshot[];
begin
    handed_at := v_now;
    if p_streams_max > 0 then
        select s.leaving, s.members into v_leaving, members from wh_share_partitions(p_incarnation, p_lease_ms) s;
        -- What is due gets its numbers, and is handed out by a later call.
        perform release_scheduled(p_incarnation,
            array(select p.partition from wh_partition p where p.owner = p_incarnation), p_rows_max);
    end if;
    delete from wh_handed_out h
    where h.incarnation = p_incarnation
        and h.partition not in (select p.partition from wh_partition p where p.owner = p_incarnation);
    select case when p_streams_max > 0 then greatest(0, p_rows_max - count(*)) else 0 end into v_room
    from wh_handed_out h where h.incarnation = p_incarnation and not h.decided;

    select r.* into v_read from wh_read_undecided(p_incarnation, v_leaving, v_room, p_stream_rows_max) r;

    -- Of parked lanes: beside the log, where their next owner finds it as well.
    if 3 = any (v_read.state) then
        perform wh_settle_work(p_incarnation, p_spill_lane => array_agg(r.lane_id),
            p_spill_destination => array_agg(r.destination), p_spill_partition => array_agg(r.partition),
            p_spill_seq => array_agg(r.stream_seq), p_spill_version => array_agg(r.version))
        from unnest(v_read.lane, v_read.destination, v_read.partition, v_read.stream_seq, v_read.version, v_read.state)
            r(lane_id, destination, partition, stream_seq, version, state)
        where r.state = 3;
        insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, incarnation, partition, beside, decided,
            destination)
        select distinct on (r.lane_id, r.destination, r.stream_seq) r.xid, r.stream_seq, r.version, v_now, r.lane_id,
            p_incarnation, r.partition, false, true, r.destination
        from unnest(v_read.xid, v_read.lane, v_read.destination, v_read.partition, v_read.stream_seq, v_read.version,
            v_read.state) r(xid, lane_id, destination, partition, stream_seq, version, state)
        where r.state = 3
        on conflict do nothing;
    end if;

    if v_room > 0 then
        -- Whoever released a lane, or discarded what it waited for, has left its row: nothing may stand behind it. Not
        -- before all is read: its head may be in the log.
        if v_read.page_end is null then
            delete from wh_parked k
            where k.due <= v_now
                and k.partition in (select p.partition from wh_partition p where p.owner = p_incarnation)
                and not exists (
                    select from wh_parked_reference r where r.lane_id = k.lane_id and r.destination = k.destination);
        end if;
        -- What has waited longest: lanes that are due.
        select array_agg(d.lane_id) as lane, array_agg(d.destination) as destination,
            array_agg(d.partition) as partition, array_agg(d.stream_seq) as stream_seq,
            array_agg(d.version) as version, array_agg(d.message_id) as message_id, count(*)::int4 as size,
            count(distinct (d.lane_id, d.destination))::int4 as lanes
        into v_due
        from (
            select r.*
            from (
                select k.* from wh_parked k
                where k.due <= v_now and k.partition = any (
                    array(select p.partition from wh_partition p
                        where p.owner = p_incarnation and not (p.partition = any (v_leaving))))
                    and exists (
                        select from wh_parked_reference r where r.lane_id = k.lane_id and r.destination = k.destination)
                order by k.due
                limit p_streams_max
            ) k
            cross join lateral (
                select r.lane_id, r.destination, r.partition, r.stream_seq, r.version,
                    coalesce(r.message_id, e.message_id) as message_id, coalesce(r.position, e.position) as position,
                    row_number() over (order by r.stream_seq) as place,
                    exists (select from wh_handed_out h
                        where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                            and h.stream_seq = r.stream_seq and h.beside) as is_out
                from (
                    select r.* from wh_parked_reference r
                    where r.lane_id = k.lane_id and r.destination = k.destination
                    order by r.stream_seq
                    limit p_stream_rows_max
                ) r
                left join wh_event_store e on r.version > 0 and e.stream_id = r.lane_id and e.version = r.version
            ) r
            where not r.is_out
                and not exists (
                    select from wh_handed_out h
                    where h.incarnation = p_incarnation and h.lane_id = k.lane_id and h.destination = k.destination
                        and not h.beside and not h.decided)
                -- Not what stands before an own one that has not been read yet.
                and (v_read.page_end is null or r.place > 1
                    or r.stream_seq = k.stream_seq or r.position <= v_read.page_end)
            order by k.due, r.lane_id, r.destination, r.stream_seq
            limit v_room
        ) d;
        if v_due.size > 0 then
            -- A follower goes only behind its head.
            insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, message_id, incarnation, partition,
                beside, destination)
            select 0, d.stream_seq, d.version, v_now, d.lane_id, d.message_id, p_incarnation, d.partition, true,
                d.destination
            from unnest(v_due.lane, v_due.destination, v_due.partition, v_due.stream_seq, v_due.version, v_due.message_id)
                d(lane_id, destination, partition, stream_seq, version, message_id)
            where not exists (
                select from wh_parked_reference r
                where r.lane_id = d.lane_id and r.destination = d.destination and r.stream_seq < d.stream_seq
                    and not exists (
                        select from wh_handed_out h
                        where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                            and h.stream_seq = r.stream_seq and h.beside)
                    and not exists (
                        select from unnest(v_due.lane, v_due.destination, v_due.stream_seq) o(lane_id, destination, stream_seq)
                        where o.lane_id = r.lane_id and o.destination = r.destination and o.stream_seq = r.stream_seq));
            v_room := v_room - v_due.size;
        end if;

        -- From the log: by position, so that of each lane it is what comes next.
        with fresh as (
            select f.lane_id, f.destination, f.turn,
                row_number() over in_lane as place, min(f.turn) over (partition by f.lane_id, f.destination) as lane_turn
            from unnest(v_read.lane, v_read.destination, v_read.state) with ordinality f(lane_id, destination, state, turn)
            where f.state = 0
            window in_lane as (partition by f.lane_id, f.destination order by f.turn)
        ), ranked as (
            select f.turn, f.place, dense_rank() over (order by f.lane_turn) as lane_place from fresh f
        )
        select array_agg(k.turn order by k.turn) into v_taken
        from (
            select r.turn::int4 as turn from ranked r
            where r.place <= p_stream_rows_max and r.lane_place <= p_streams_max - coalesce(v_due.lanes, 0)
            order by r.turn
            limit v_room
        ) k;
        if v_taken is not null then
            select array_agg(coalesce(e.message_id, o.message_id) order by t.turn) into v_message
            from unnest(v_taken) with ordinality t(element, turn)
            left join wh_event_store e on e.stream_id = v_read.lane[t.element]
                and e.version = nullif(v_read.version[t.element], 0)
            left join lateral (
                select o.message_id
                from wh_outbox o
                where o.segment = v_read.segment[t.element] and o.lane_id = v_read.lane[t.element]
                    and o.stream_seq = case when v_read.version[t.element] = 0 then v_read.stream_seq[t.element] end
            ) o on true;
            insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, message_id, incarnation, partition,
                beside, decided, destination)
            select v_read.xid[t.element], v_read.stream_seq[t.element], v_read.version[t.element], v_now,
                v_read.lane[t.element], t.message_id, p_incarnation, v_read.partition[t.element], false,
                t.message_id is null, v_read.destination[t.element]
            from unnest(v_taken, v_message) t(element, message_id)
            on conflict do nothing;
        end if;

        -- Deleted before it was published: dead, alone.
        perform wh_settle_work(p_incarnation, p_dead_lane => array_agg(h.lane_id),
            p_dead_destination => array_agg(h.destination), p_dead_partition => array_agg(h.partition),
            p_dead_seq => array_agg(h.stream_seq), p_dead_version => array_agg(h.version),
            p_dead_attempts => array_agg(0), p_dead_reason => array_agg(7::int2),
            p_dead_error => array_agg('CL001: the message is not stored any more: it was deleted before it was published'::text),
            p_dead_error_cut => array_agg(false))
        from wh_handed_out h
        where h.incarnation = p_incarnation and h.handed_at = v_now and h.message_id is null
            and (h.beside or h.stream_seq = any (
                select v_read.stream_seq[t.element] from unnest(v_taken) t(element)
                where v_read.lane[t.element] = h.lane_id and v_read.destination[t.element] = h.destination))
        having count(*) > 0;
        delete from wh_handed_out h
        where h.incarnation = p_incarnation and h.handed_at = v_now and h.message_id is null and h.beside;
    end if;

    -- How far it has come. What stands as decided now was so before, or is so by now.
    if v_read.any_log then
        select array_agg(distinct r.xid) into v_open
        from unnest(v_read.xid, v_read.lane, v_read.destination, v_read.stream_seq, v_read.state)
            r(xid, lane_id, destination, stream_seq, state)
        where r.state <> 2 and not exists (
            select from wh_handed_out h
            where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                and h.stream_seq = r.stream_seq and not h.beside and h.decided);
    end if;
    if v_read.page_end is not null then
        select l.xid into v_unread
        from wh_log l
        where l.xid >= v_read.begun_xmax and l.xid < v_read.read_xmax and l.position > v_read.page_end
        order by l.xid limit 1;
        v_rest := array(
            select x from unnest(v_read.begun_listed) x
            where exists (select from wh_log l where l.xid = x and l.position > v_read.page_end));
    end if;
    v_open := coalesce(v_open, '{}') || v_read.running || coalesce(v_rest, '{}');
    v_xmax := least(v_read.read_xmax, coalesce(v_unread, v_read.read_xmax));
    select x into v_cut
    from (select distinct x from unnest(v_open) x where x < v_xmax) o
    order by x offset 1000 limit 1;
    v_cursor := wh_snapshot_of(least(v_xmax, coalesce(v_cut, v_xmax)), v_open);
    select i.ownership into v_ownership from wh_instance i where i.number = p_incarnation;
    if v_read.any_log then
        insert into wh_cursor (ownership, incarnation, shard, resolved)
        select v_ownership, p_incarnation, 0, v_cursor
        where exists (select from wh_partition p where p.owner = p_incarnation)
            and v_cursor::text is distinct from (
                select c.resolved::text from wh_cursor c
                where c.incarnation = p_incarnation and c.shard = 0 and c.ownership = v_ownership
                order by c.number desc limit 1);
        delete from wh_handed_out h
        where h.incarnation = p_incarnation and h.decided and not h.beside
            and pg_visible_in_snapshot(h.xid::text::xid8, v_cursor);
    end if;

    if cardinality(v_leaving) > 0 then
        v_gone := array(
            select g from unnest(v_leaving) g
            where not exists (
                select from wh_handed_out h
                where h.incarnation = p_incarnation and h.partition = g and not h.decided
                    and h.handed_at > v_now - p_lease_ms * interval '1 millisecond'));
        if cardinality(v_gone) > 0 then
            v_resolved := array(
                select wh_snapshot_of(v_xmax, v_read.running || coalesce(v_rest, '{}') || array(
                    select r.xid
                    from unnest(v_read.xid, v_read.lane, v_read.destination, v_read.partition, v_read.stream_seq,
                        v_read.state) r(xid, lane_id, destination, partition, stream_seq, state)
                    where r.partition = g.partition and r.state <> 2 and not exists (
                        select from wh_handed_out h
                        where h.incarnation = p_incarnation and h.lane_id = r.lane_id and h.destination = r.destination
                            and h.stream_seq = r.stream_seq and not h.beside and h.decided)))
                from unnest(v_gone) with ordinality g(partition, turn)
                order by g.turn);
            perform release_partitions(p_incarnation, wh_epoch_token(), v_gone, v_resolved);
            delete from wh_handed_out h where h.incarnation = p_incarnation and h.partition = any (v_gone);
        end if;
    end if;
end
$$;
