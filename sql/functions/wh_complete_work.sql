-- wh_complete_work: what a worker that speaks SQL has published, or gives back.
-- in: p_incarnation (its fence is held); p_message_ids; p_destinations (null, or null elements: every destination of
--     the message that is in hand); p_statuses (null, or null elements: 4, Published). A status with bit 4 is the end
--     of the message there; 0 gives it back, to be handed out again. Any other is refused (22023): the reference
--     takes it for an end and loses the message
-- out: completed, returned: references; unknown: elements that name nothing in hand (decided before, withdrawn, or
--     of a partition that has gone): they are passed over
-- order: any. What is decided out of order is remembered until its transaction is resolved
-- locks: rows of its own    cost: a probe an element, an update each
create or replace function @schema@.wh_complete_work(
    p_incarnation int4, p_message_ids uuid[], p_destinations text[], p_statuses int4[],
    out completed int4, out returned int4, out unknown int4)
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    v_element int8;
    v_status int4;
    v_lane uuid[];
    v_destination text[];
    v_partition int4[];
    v_seq int8[];
    v_beside bool[];
    v_returned bool[];
begin
    completed := 0;
    returned := 0;
    unknown := 0;
    if coalesce(cardinality(p_message_ids), 0) = 0 then
        return;
    end if;
    if cardinality(p_destinations) <> cardinality(p_message_ids) or cardinality(p_statuses) <> cardinality(p_message_ids) then
        raise exception 'completions: % message ids, % destinations, % statuses', cardinality(p_message_ids),
            cardinality(p_destinations), cardinality(p_statuses) using errcode = '22023';
    end if;
    select s.element, s.status into v_element, v_status
    from unnest(p_statuses) with ordinality s(status, element)
    where s.status <> 0 and (s.status & 4 = 0 or s.status & 32768 <> 0)
    order by s.element limit 1;
    if found then
        raise exception 'completion % (message %): status % is no completion', v_element, p_message_ids[v_element], v_status
            using errcode = '22023', hint = 'Published (4) is, and 0 gives the message back.';
    end if;

    with named as materialized (
        select m.*, coalesce(p_statuses[m.turn::int4], 4) = 0 as returned
        from wh_match_in_hand(p_incarnation, p_message_ids, p_destinations) m
    ), hit as (
        select distinct on (n.lane_id, n.destination, n.stream_seq, n.beside) n.*
        from named n
        order by n.lane_id, n.destination, n.stream_seq, n.beside, n.returned, n.turn
    )
    select array_agg(h.lane_id), array_agg(h.destination), array_agg(h.partition), array_agg(h.stream_seq),
        array_agg(h.beside), array_agg(h.returned), count(*) filter (where not h.returned),
        count(*) filter (where h.returned),
        cardinality(p_message_ids) - (select count(distinct n.turn) from named n)
    into v_lane, v_destination, v_partition, v_seq, v_beside, v_returned, completed, returned, unknown
    from hit h;
    if v_lane is null then
        return;
    end if;

    update wh_handed_out h set decided = true
    from unnest(v_lane, v_destination, v_seq, v_beside, v_returned) d(lane_id, destination, stream_seq, beside, returned)
    where h.incarnation = p_incarnation and h.lane_id = d.lane_id and h.destination = d.destination
        and h.stream_seq = d.stream_seq and h.beside = d.beside and not d.beside and not d.returned;
    delete from wh_handed_out h
    using unnest(v_lane, v_destination, v_seq, v_beside, v_returned) d(lane_id, destination, stream_seq, beside, returned)
    where h.incarnation = p_incarnation and h.lane_id = d.lane_id and h.destination = d.destination
        and h.stream_seq = d.stream_seq and h.beside = d.beside and (d.beside or d.returned);
    select coalesce(array_agg(d.lane_id), '{}'), coalesce(array_agg(d.destination), '{}'),
        coalesce(array_agg(d.partition), '{}'), coalesce(array_agg(d.stream_seq), '{}')
    into v_lane, v_destination, v_partition, v_seq
    from unnest(v_lane, v_destination, v_partition, v_seq, v_beside, v_returned)
        d(lane_id, destination, partition, stream_seq, beside, returned)
    where d.beside and not d.returned;
    perform wh_settle_work(p_incarnation, p_drained_lane => v_lane, p_drained_destination => v_destination,
        p_drained_partition => v_partition, p_drained_seq => v_seq);
end
$$;
