-- find_flush: whether a flush whose connection was lost at its commit is there.
-- in: p_incarnation, p_shard, p_flush; p_since: a transaction id no newer than the flush's; p_stream_id: its streams;
--     p_stream_rows: how many numbered messages it has of each
-- out: no row if it did not commit, and never will: it is given up, should its call arrive yet; else xid, epoch,
--     position, owned, and the numbers that each stream had before it (0: none)
-- truncated: its log rows may be gone by now (everything of it is published, or had no destination). It is found all
--     the same, by what rotation has noted, and its numbers by its events; refused with CL006 if it is stored and they
--     cannot be told, because other messages of its streams are truncated too
-- refused with CL005 if it is not there and the incarnation has ended: then its absence proves nothing
-- locks: the shard's flushes (exclusive, waiting): the lost transaction holds it until it has ended, and a second
--     one of the same number cannot begin meanwhile. The look-up is a later statement than the lock
-- cost: the log since p_since; a scan of each stream's rows (rare: once a lost connection)
create or replace function @schema@.find_flush(
    p_incarnation int4, p_shard int2, p_flush int8, p_since int8, p_stream_id uuid[],
    p_stream_rows int4[])
returns table (xid int8, epoch uuid, "position" int8, owned bool, last_seq int8[], last_version int8[])
language plpgsql volatile
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_xid int8;
    v_position int8;
    v_owned bool;
    v_truncated bool := false;
    v_incomplete text;
    v_last_seq int8[];
    v_last_version int8[];
begin
    perform pg_advisory_xact_lock(@schema@.wh_lock_class(7), @schema@.wh_flush_key(p_incarnation, p_shard));

    select min(l.xid), min(l.position), bool_and(l.owned) into v_xid, v_position, v_owned
    from @schema@.wh_log l
    where l.xid >= p_since and l.incarnation = p_incarnation and l.shard = p_shard and l.flush_number = p_flush;
    if v_xid is null then
        -- A later statement: if the log rows went a moment ago, what was noted of them is there.
        select t.xid, t.position, t.owned, true into v_xid, v_position, v_owned, v_truncated
        from @schema@.wh_flush_truncated t
        where t.incarnation = p_incarnation and t.shard = p_shard and t.flush_number = p_flush;
    end if;
    if v_xid is null then
        if not exists (select from @schema@.wh_instance i where i.number = p_incarnation and i.state = 0) then
            -- Its successors may have published what it stored, and a rotation may have truncated it.
            raise exception 'whether flush % of incarnation % was stored cannot be told any more: the incarnation has ended',
                p_flush, p_incarnation using errcode = 'CL005';
        end if;
        insert into @schema@.wh_flush_given_up as g (flush_number, incarnation, shard)
        values (p_flush, p_incarnation, p_shard)
        on conflict (incarnation, shard) do update
        set flush_number = greatest(g.flush_number, excluded.flush_number), given_up_at = excluded.given_up_at;
        return;
    end if;

    select array_agg(n.last_seq order by n.turn), array_agg(n.last_version order by n.turn),
        min(n.id::text) filter (where n.found < p_stream_rows[n.turn])
    into v_last_seq, v_last_version, v_incomplete
    from (
        select s.turn, s.id, e.found + o.found as found, coalesce(least(e.first_seq, o.first_seq) - 1, 0) as last_seq,
            coalesce(e.first_version - 1, (
                select v.version from @schema@.wh_event_store v
                where v.stream_id = s.id and v.xid <> v_xid and v.position < v_position
                order by v.version desc limit 1), 0) as last_version
        from unnest(p_stream_id) with ordinality s(id, turn)
        cross join lateral (
            select count(*) as found, min(e.stream_seq) as first_seq, min(e.version) as first_version
            from @schema@.wh_event_store e where e.stream_id = s.id and e.xid = v_xid
        ) e
        cross join lateral (
            select count(*) as found, min(o.stream_seq) as first_seq
            from @schema@.wh_outbox o where o.lane_id = s.id and o.xid = v_xid
        ) o
    ) n;
    if v_truncated and v_incomplete is not null then
        raise exception 'the messages of flush % are stored, and what numbers they have cannot be told any more (stream %)',
            p_flush, v_incomplete using errcode = 'CL006';
    end if;
    return query select v_xid, @schema@.wh_epoch_token(), v_position, v_owned, v_last_seq, v_last_version;
end
$$;
