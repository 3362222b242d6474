-- wh_fail_work: what a worker that speaks SQL could not publish.
-- in: p_incarnation (its fence is held); p_message_ids; p_destinations (null, or null elements: every one in hand);
--     p_reasons (the reference's numbers; null: 99); p_errors; p_dead (all of them go to the dead letters, whatever
--     their reason); p_attempts_max, p_base_ms, p_cap_ms: attempt n that failed waits base * 2^(n - 1), at most cap,
--     give or take a tenth; p_hold: destinations whose streams wait behind a message that dies, until an operator decides
-- reasons: 1 and 8 (not ready, throttled) cost no attempt and wait a thirtieth of the base; 3, 4 and 12 (cannot be
--     written, not valid, too large) go to the dead letters at once; a number that is not known is 99
-- withdraws: what is in hand behind a failure in its stream and destination: it comes again, in order, when the failed
--     one has gone out or died
-- hold: as an engine does it: the lane is parked without a due time behind the dead letter. Of a stream that is to be held
--     only the first failure counts: those behind it are withdrawn, whatever they died of
-- out: failed, dead: references; unknown: elements that name nothing in hand
-- locks: as settle    cost: a probe an element; what is withdrawn is copied beside the log
create or replace function @schema@.wh_fail_work(
    p_incarnation int4, p_message_ids uuid[], p_destinations text[], p_reasons int4[], p_errors text[], p_dead bool,
    p_attempts_max int4, p_base_ms int8, p_cap_ms int8, p_hold text[],
    out failed int4, out dead int4, out unknown int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    v_lane uuid[];
    v_destination text[];
    v_partition int4[];
    v_seq int8[];
    v_version int8[];
    v_beside bool[];
    v_attempts int4[];
    v_counted bool[];
    v_reason int2[];
    v_error text[];
    v_is_cut bool[];
    v_is_dead bool[];
    v_holds bool[];
    v_is_held bool[];
    v_done record;
begin
    failed := 0;
    dead := 0;
    unknown := 0;
    perform wh_require('p_attempts_max', p_attempts_max, 1, 1000000);
    perform wh_require('p_retry_base_ms', p_base_ms, 0, 86400000);
    perform wh_require('p_retry_cap_ms', p_cap_ms, 0, 86400000);
    if coalesce(cardinality(p_message_ids), 0) = 0 then
        return;
    end if;
    if cardinality(p_destinations) <> cardinality(p_message_ids) or cardinality(p_reasons) <> cardinality(p_message_ids)
        or cardinality(p_errors) <> cardinality(p_message_ids)
    then
        raise exception 'failures: % message ids, % destinations, % reasons, % errors', cardinality(p_message_ids),
            cardinality(p_destinations), cardinality(p_reasons), cardinality(p_errors) using errcode = '22023';
    end if;

    with failure as (
        select wh_cut_error(f.error) as error, octet_length(convert_to(f.error, 'UTF8')) > 8192 as is_cut,
            (case when f.reason = any ('{0,1,2,3,4,5,6,7,8,12}') then f.reason else 99 end)::int2 as reason, f.turn
        from unnest(p_message_ids, p_reasons, p_errors) with ordinality f(message_id, reason, error, turn)
    ), named as materialized (
        select m.* from wh_match_in_hand(p_incarnation, p_message_ids, p_destinations) m
    ), hit as (
        select distinct on (h.lane_id, h.destination, h.stream_seq) h.*, f.reason, f.error,
            coalesce(f.is_cut, false) as is_cut, not p_dead and f.reason in (1, 8) as is_free,
            coalesce(k.attempts, 0) as attempts_before, w.lane_id is not null as is_held,
            -- A message without stream has a lane of its own.
            coalesce(h.destination = any (p_hold), false) and h.lane_id <> wh_lane(h.message_id) as holds
        from failure f
        join named h on h.turn = f.turn
        left join wh_parked k on k.lane_id = h.lane_id and k.destination = h.destination and k.stream_seq = h.stream_seq
        left join wh_parked w on w.lane_id = h.lane_id and w.destination = h.destination and w.held
        order by h.lane_id, h.destination, h.stream_seq, h.beside, f.turn desc
    ), judged as (
        select h.*, h.attempts_before + (not h.is_free)::int4 as attempts, (p_dead or h.reason in (3, 4, 12)
            or not h.is_free and h.attempts_before + 1 >= p_attempts_max)
            and (not h.holds or row_number() over (partition by h.lane_id, h.destination order by h.stream_seq) = 1)
            as is_dead
        from hit h
    )
    select array_agg(j.lane_id), array_agg(j.destination), array_agg(j.partition), array_agg(j.stream_seq),
        array_agg(j.version), array_agg(j.beside), array_agg(j.attempts), array_agg(not j.is_free),
        array_agg(j.reason), array_agg(j.error), array_agg(j.is_cut), array_agg(j.is_dead),
        array_agg(j.holds and j.is_dead), array_agg(j.is_held),
        count(*) filter (where not j.is_dead), count(*) filter (where j.is_dead),
        cardinality(p_message_ids) - (select count(distinct n.turn) from named n)
    into v_lane, v_destination, v_partition, v_seq, v_version, v_beside, v_attempts, v_counted, v_reason, v_error,
        v_is_cut, v_is_dead, v_holds, v_is_held, failed, dead, unknown
    from judged j;
    if v_lane is null then
        return;
    end if;

    -- The first of a lane parks it; what stands behind it in the log is kept beside, dead or withdrawn. A lane that is
    -- held stays so.
    with judged as (
        select * from unnest(v_lane, v_destination, v_partition, v_seq, v_version, v_attempts, v_counted, v_reason,
            v_error, v_is_cut, v_is_dead, v_holds, v_is_held)
            j(lane_id, destination, partition, stream_seq, version, attempts, counted, reason, error, is_cut, is_dead,
                holds, is_held)
    ), first as (
        select distinct on (j.lane_id, j.destination) j.*,
            case
                when j.holds then 3155760000000
                when not j.counted then p_base_ms / 30
                else (least(p_base_ms * 2.0 ^ least(j.attempts - 1, 40), p_cap_ms) * (0.9 + 0.2 * random()))::int8
            end as due_in_ms
        from judged j
        where not j.is_dead or j.holds
        order by j.lane_id, j.destination, j.stream_seq
    ), spill as (
        select h.lane_id, h.destination, h.partition, h.stream_seq, h.version
        from first k
        join wh_handed_out h on h.incarnation = p_incarnation and h.lane_id = k.lane_id
            and h.destination = k.destination and h.stream_seq >= k.stream_seq and not h.beside and not h.decided
        where not exists (
            select from judged j
            where j.is_dead and j.lane_id = h.lane_id and j.destination = h.destination and j.stream_seq = h.stream_seq)
    ), kept as (
        update wh_handed_out h set decided = true from spill s
        where h.incarnation = p_incarnation and h.lane_id = s.lane_id and h.destination = s.destination
            and h.stream_seq = s.stream_seq and not h.beside
    ), p as (
        select coalesce(array_agg(k.lane_id), '{}') as lane_id, coalesce(array_agg(k.destination), '{}') as destination,
            coalesce(array_agg(k.partition), '{}') as partition, coalesce(array_agg(k.stream_seq), '{}') as stream_seq,
            coalesce(array_agg(k.attempts), '{}') as attempts, coalesce(array_agg(k.reason), '{}') as reason,
            coalesce(array_agg(k.error), '{}') as error, coalesce(array_agg(k.is_cut), '{}') as is_cut,
            coalesce(array_agg(k.due_in_ms), '{}') as due_in_ms
        from first k
        where k.holds or not k.is_held
    ), s as (
        select coalesce(array_agg(s.lane_id), '{}') as lane_id, coalesce(array_agg(s.destination), '{}') as destination,
            coalesce(array_agg(s.partition), '{}') as partition, coalesce(array_agg(s.stream_seq), '{}') as stream_seq,
            coalesce(array_agg(s.version), '{}') as version
        from spill s
    ), d as (
        select coalesce(array_agg(j.lane_id), '{}') as lane_id, coalesce(array_agg(j.destination), '{}') as destination,
            coalesce(array_agg(j.partition), '{}') as partition, coalesce(array_agg(j.stream_seq), '{}') as stream_seq,
            coalesce(array_agg(j.version), '{}') as version, coalesce(array_agg(j.attempts), '{}') as attempts,
            coalesce(array_agg(j.reason), '{}') as reason, coalesce(array_agg(j.error), '{}') as error,
            coalesce(array_agg(j.is_cut), '{}') as is_cut
        from judged j where j.is_dead
    )
    select wh_settle_work(p_incarnation, p.lane_id, p.destination, p.partition, p.stream_seq, p.attempts, p.reason,
        p.error, p.is_cut, p.due_in_ms, s.lane_id, s.destination, s.partition, s.stream_seq, s.version,
        '{}', '{}', '{}', '{}', d.lane_id, d.destination, d.partition, d.stream_seq, d.version, d.attempts, d.reason,
        d.error, d.is_cut) as done
    into v_done
    from p, s, d;
    update wh_handed_out h set decided = true
    from unnest(v_lane, v_destination, v_seq, v_is_dead) j(lane_id, destination, stream_seq, is_dead)
    where h.incarnation = p_incarnation and h.lane_id = j.lane_id and h.destination = j.destination
        and h.stream_seq = j.stream_seq and not h.beside and j.is_dead;
    delete from wh_handed_out h
    using (
        select j.lane_id, j.destination, min(j.stream_seq) as stream_seq
        from unnest(v_lane, v_destination, v_seq) j(lane_id, destination, stream_seq)
        group by j.lane_id, j.destination
    ) f
    where h.incarnation = p_incarnation and h.lane_id = f.lane_id and h.destination = f.destination
        and h.stream_seq >= f.stream_seq and not h.decided;
end
$$;
