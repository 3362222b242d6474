-- discard_dead_letters: deletes dead letters for good. Events stay in the event store; other messages are gone.
-- in: the filter (see wh_match_dead_letters); p_dry_run: only count; p_rows_max: at most so many at once (1 to 4,096): call
--     it until `more` is false, each call a transaction of its own
-- out: matched, discarded (0 if only counted), released (lanes that were held behind one of these and go on), more
-- takes hold, errors: as retry_dead_letters
-- locks: as wh_take_dead_letters; if lanes are held behind them, their rows of wh_parked
-- cost: a few statements, a probe or two a dead letter
create or replace function @schema@.discard_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_destination text default null, p_type text default null,
    p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 1000, p_dry_run bool default true,
    out matched int4, out discarded int4, out released int4, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_ids int8[];
    v_lanes uuid[];
    v_destinations text[];
begin
    discarded := 0;
    select t.ids, t.more into v_ids, more from wh_take_dead_letters(p_all, p_ids, p_destination, p_type, p_reason,
        p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;

    -- A later statement than the locks: an owner may have begun to hold a lane, another operator may have been here.
    select count(*), coalesce(array_agg(d.lane_id) filter (where k.held), '{}'),
        coalesce(array_agg(d.destination) filter (where k.held), '{}')
    into matched, v_lanes, v_destinations
    from wh_dead_letter d
    left join wh_parked k
        on k.lane_id = d.lane_id and k.destination = d.destination and k.held and k.stream_seq = d.stream_seq
    where d.dead_letter_id = any (v_ids);
    released := cardinality(v_lanes);
    if p_dry_run or matched = 0 then
        return;
    end if;
    released := release_lanes(v_lanes, v_destinations);
    delete from wh_dead_letter d where d.dead_letter_id = any (v_ids);
    get diagnostics discarded = row_count;
end
$$;
