-- wh_share_partitions: one look of a worker that speaks SQL at the others: who is dead, what is free, what is too much.
-- in: p_incarnation (its fence is held, its lease renewed); p_lease_ms
-- out: leaving (partitions that are another's share: nothing of them is handed out any more); members (how many share)
-- shares: those of plan/assign: even, the remainder to those who hold most. Which partition goes where matters to
--     nobody but a little traffic: so this takes any free ones up to its share, and gives up those above it of which
--     the least is in hand (and has been for no longer than a lease). Engines take by rendezvous what is free, up to
--     theirs, in statements that find it free
-- deaths: another's lease is past by the database's clock, and its heartbeat has stood still for p_lease_ms of this
--     worker's own calls. The time between two of them counts for a second at most: a step of the clock ends nobody
-- locks: fences of those it declares dead, by trying; rows of free partitions (those that somebody else is taking are
--     left to him) and, if it takes some, its own
-- cost: the rows of wh_partition; an update of each partition if it takes some
create or replace function @schema@.wh_share_partitions(
    p_incarnation int4, p_lease_ms int8, out leaving int4[], out members int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
declare
    v_now constant timestamptz := clock_timestamp();
    v_late record;
    v_share int4;
    v_held int4;
    v_free int4[];
begin
    if exists (select from wh_instance i where i.state = 0 and i.lease_until < v_now and i.number <> p_incarnation)
        or exists (select from wh_worker_watch w where w.incarnation = p_incarnation)
    then
        delete from wh_worker_watch w
        where w.incarnation = p_incarnation and not exists (
            select from wh_instance i
            where i.number = w.watched and i.state = 0 and i.counter = w.counter and i.lease_until < v_now);
        insert into wh_worker_watch as w (counter, looked_at, incarnation, watched)
        select i.counter, v_now, p_incarnation, i.number
        from wh_instance i
        where i.state = 0 and i.lease_until < v_now and i.number <> p_incarnation
        on conflict (incarnation, watched) do update
        set looked_at = v_now, watched_ms = w.watched_ms
            + least(1000, greatest(0, extract(epoch from v_now - w.looked_at) * 1000))::int8;
        for v_late in
            select w.watched, w.counter from wh_worker_watch w
            where w.incarnation = p_incarnation and w.watched_ms >= p_lease_ms
                and pg_try_advisory_xact_lock(wh_lock_class(3), w.watched)
            order by w.watched
        loop
            perform mark_dead(v_late.watched, v_late.counter, false);
        end loop;
    end if;

    with claimant as (
        select i.number, i.id, coalesce(o.held, 0) as held
        from wh_instance i
        left join (select p.owner, count(*)::int4 as held from wh_partition p group by p.owner) o on o.owner = i.number
        where i.state = 0 and (i.number = p_incarnation or i.lease_until > v_now and coalesce(i.owns, o.held > 0))
    ), ranked as (
        select c.*, row_number() over (order by c.held desc, c.id) as place, count(*) over () as claimants
        from claimant c
    )
    select r.claimants, r.held, n.partition_count / r.claimants + (r.place <= n.partition_count % r.claimants)::int4
    into strict members, v_held, v_share
    from ranked r, wh_installation n
    where r.number = p_incarnation;

    leaving := '{}';
    if v_held < v_share then
        v_free := array(
            select p.partition from wh_partition p where p.owner is null order by p.partition limit v_share - v_held);
        if cardinality(v_free) > 0 then
            -- Cursors of before say nothing of a larger set: what they have resolved becomes the bases.
            update wh_partition p
            set base = wh_snapshot_union(r.base, r.cursor)
            from wh_resolved r
            where r.partition = p.partition and p.owner = p_incarnation and r.cursor::text <> '1:1:';
            perform take_partitions(p_incarnation, v_free);
        end if;
    elsif v_held > v_share then
        leaving := array(
            select p.partition
            from wh_partition p
            left join (
                select h.partition, count(*) as size from wh_handed_out h
                where h.incarnation = p_incarnation and not h.decided
                    and h.handed_at > v_now - p_lease_ms * interval '1 millisecond'
                group by h.partition
            ) h on h.partition = p.partition
            where p.owner = p_incarnation
            order by coalesce(h.size, 0), p.partition
            limit v_held - v_share);
    end if;
end
$$;
