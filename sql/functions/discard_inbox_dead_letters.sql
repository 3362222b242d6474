-- discard_inbox_dead_letters: deletes dead letters of the inbox for good. They are remembered: a copy that arrives later
-- is a duplicate.
-- in: the filter (see wh_match_inbox_dead_letters); p_dry_run: only count; p_rows_max: at most so many at once (1 to
--     4,096): call it until `more` is false, each call a transaction of its own
-- out: matched, discarded (0 if only counted), released (lanes that were held behind one of these and go on), more
-- errors: as wh_match_inbox_dead_letters
-- locks: the dead letters (for update, by id); rows of wh_inbox_parked, by consumer and lane
-- cost: a few statements, a probe or two a dead letter
create or replace function @schema@.discard_inbox_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_consumer text default null, p_source text default null,
    p_type text default null, p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 1000, p_dry_run bool default true,
    out matched int4, out discarded int4, out released int4, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_ids int8[];
begin
    discarded := 0;
    select t.ids, t.more into v_ids, more from wh_take_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type,
        p_reason, p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;
    if not p_dry_run then
        perform from wh_inbox_parked k
        where (k.consumer, k.lane_id) in (
            select d.consumer, d.lane_id from wh_inbox_dead_letter d where d.dead_letter_id = any (v_ids))
        order by k.consumer, k.lane_id
        for update;
    end if;
    -- A later statement than the locks.
    select count(*), count(k.lane_id)
    into matched, released
    from wh_inbox_dead_letter d
    left join wh_inbox_parked k
        on k.consumer = d.consumer and k.lane_id = d.lane_id and k.held and k.message_id = d.message_id
    where d.dead_letter_id = any (v_ids);
    if p_dry_run or matched = 0 then
        return;
    end if;
    -- The next claim frees the lane if nothing waits in it.
    update wh_inbox_parked k
    set held = false, due = clock_timestamp(), attempts = 0, reason = 0, error = '', error_cut = false
    from wh_inbox_dead_letter d
    where d.dead_letter_id = any (v_ids) and k.consumer = d.consumer and k.lane_id = d.lane_id and k.held
        and k.message_id = d.message_id;
    delete from wh_inbox_dead_letter d where d.dead_letter_id = any (v_ids);
    get diagnostics discarded = row_count;
end
$$;
