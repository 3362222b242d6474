-- retry_dead_letters: gives dead letters back to be published, in order with what their streams still have to publish.
-- in: the filter (see wh_match_dead_letters); p_dry_run: only count; p_rows_max: at most so many at once (1 to 4,096): call
--     it until `more` is false, each call a transaction of its own
-- out: matched, retried (0 if only counted), not_stored (left as they are: somebody has deleted the message), lanes (that
--     get something back), released (of them: were held behind one of these), more (further ones match, beyond p_rows_max)
-- how: the message is put beside the log as if its lane had just been parked: due now, without attempts, `retried` one
--     more than before; the dead letter goes. So it comes before everything of its lane that is not published yet
--     (except what a parked lane has already read again to publish: at most a page), by number among those that wait.
--     What its stream has published since has overtaken it: a dead letter has no place in the order any more.
-- attempts: those of a parked head that waits before all that is given back to its lane stay
-- hold: a lane that is held behind one of these goes on. One that is held behind another one stays held, and what is
--     given back waits in it, first by number
-- mark: what goes out then bears `replayed`
-- takes hold: at once where the owner lives (it reads of it in the log, see wh_tell_lanes), else with the next owner. A
--     program older than this function finds it when it next reads anew
-- errors: as wh_take_dead_letters
-- locks: as wh_take_dead_letters; rows of wh_parked
-- cost: a few statements, a probe or two and a copy of the body a message
create or replace function @schema@.retry_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_destination text default null, p_type text default null,
    p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 1000, p_dry_run bool default true,
    out matched int4, out retried int4, out not_stored int4, out lanes int4, out released int4, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_ids int8[];
    v_good int8[];
    v_lanes uuid[];
    v_destinations text[];
    v_partitions int4[];
    v_numbers int8[];
begin
    retried := 0;
    select t.ids, t.more into v_ids, more from wh_take_dead_letters(p_all, p_ids, p_destination, p_type, p_reason,
        p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;

    -- Later statements than the locks: another operator may have been here.
    select count(*), coalesce(array_agg(d.dead_letter_id) filter (where case
            when d.version = 0 or d.payload is not null then d.payload is not null else exists (
                select from wh_event_store e where e.stream_id = d.lane_id and e.version = d.version) end), '{}')
    into matched, v_good
    from wh_dead_letter d where d.dead_letter_id = any (v_ids);
    not_stored := matched - cardinality(v_good);

    select coalesce(array_agg(l.lane_id order by l.lane_id, l.destination), '{}'),
        array_agg(l.destination order by l.lane_id, l.destination),
        array_agg(l.partition order by l.lane_id, l.destination),
        coalesce(array_agg(l.number order by l.lane_id, l.destination), '{}')
    into v_lanes, v_destinations, v_partitions, v_numbers
    from (
        select d.lane_id, d.destination, min(d.partition) as partition,
            case when bool_or(k.held and k.stream_seq = d.stream_seq) then -1 else 0 end as number
        from wh_dead_letter d
        left join wh_parked k on k.lane_id = d.lane_id and k.destination = d.destination
        where d.dead_letter_id = any (v_good)
        group by d.lane_id, d.destination
    ) l;
    lanes := cardinality(v_lanes);
    released := (select count(*) from unnest(v_numbers) n where n = -1);
    if p_dry_run or lanes = 0 then
        return;
    end if;

    insert into wh_parked as k (stream_seq, due, lane_id, partition, attempts, reason, destination)
    select min(d.stream_seq), clock_timestamp(), d.lane_id, min(d.partition), 0, 0, d.destination
    from wh_dead_letter d
    where d.dead_letter_id = any (v_good)
    group by d.lane_id, d.destination
    order by d.lane_id, d.destination
    on conflict (lane_id, destination) do update
    set due = excluded.due, held = false, stream_seq = least(k.stream_seq, excluded.stream_seq),
        -- Of a head that waits before all of these: its own.
        attempts = case
            when k.stream_seq < excluded.stream_seq and exists (
                select from wh_parked_reference r
                where r.lane_id = k.lane_id and r.destination = k.destination and r.stream_seq = k.stream_seq)
                then k.attempts
            else 0
        end
    where not k.held or exists (
        select from wh_dead_letter d
        where d.dead_letter_id = any (v_good) and d.lane_id = k.lane_id and d.destination = k.destination
            and d.stream_seq = k.stream_seq);
    with given_back as (
        delete from wh_dead_letter d where d.dead_letter_id = any (v_good) returning d.*
    )
    insert into wh_parked_reference (stream_seq, version, position, span_id, stored_at, lane_id, stream_id, message_id,
        correlation_id, causation_id, trace_id, partition, trace_flags, destination, type_name, content_type, metadata,
        payload, retried)
    select d.stream_seq, d.version, d.position, d.span_id, d.stored_at, d.lane_id, d.stream_id, d.message_id,
        d.correlation_id, d.causation_id, d.trace_id, d.partition, d.trace_flags, d.destination, d.type_name,
        d.content_type, d.metadata, d.payload, d.retried + 1
    from given_back d
    on conflict (lane_id, destination, stream_seq) do update set retried = excluded.retried;
    retried := cardinality(v_good);
    perform wh_tell_lanes(v_lanes, v_destinations, v_partitions, v_numbers);
end
$$;
