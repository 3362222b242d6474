-- retry_inbox_dead_letters: gives the inbox's dead letters back to be handled, before what waits in their lanes.
-- in: the filter (see wh_match_inbox_dead_letters); p_dry_run: only count; p_rows_max: at most so many at once (1 to
--     4,096): call it until `more` is false, each call a transaction of its own
-- out: matched, retried (0 if only counted), lanes (that get something back), released (of them: were held behind one of
--     these), more (further ones match, beyond p_rows_max)
-- how: the message is kept again, where it stood in the order of arrival, and its lane is parked and due now; the dead
--     letter goes, `retried` is one more. What was handled of its lane since has overtaken it
-- hold: a lane that is held behind one of these goes on. One that is held behind another one stays held
-- takes hold: with the next claim of whoever handles the lane
-- errors: as wh_match_inbox_dead_letters
-- locks: the dead letters (for update, by id); rows of wh_inbox_parked, by consumer and lane
-- cost: a few statements, a probe or two and a copy of the body a message
create or replace function @schema@.retry_inbox_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_consumer text default null, p_source text default null,
    p_type text default null, p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 1000, p_dry_run bool default true,
    out matched int4, out retried int4, out lanes int4, out released int4, out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_ids int8[];
begin
    retried := 0;
    select t.ids, t.more into v_ids, more from wh_take_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type,
        p_reason, p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max, p_dry_run) t;
    -- A later statement than the lock: another operator may have been here.
    select count(*), count(distinct (d.consumer, d.lane_id)),
        count(distinct (d.consumer, d.lane_id)) filter (where k.held and k.message_id = d.message_id)
    into matched, lanes, released
    from wh_inbox_dead_letter d
    left join wh_inbox_parked k on k.consumer = d.consumer and k.lane_id = d.lane_id
    where d.dead_letter_id = any (v_ids);
    if p_dry_run or matched = 0 then
        return;
    end if;

    -- Before the bodies: whoever frees a lane waits for this, and then sees them (unpark_inbox).
    insert into wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason)
    select distinct on (d.consumer, d.lane_id) clock_timestamp(), d.lane_id, d.message_id,
        compute_partition(d.lane_id, (select i.partition_count from wh_installation i)), 0, d.consumer, 0
    from wh_inbox_dead_letter d
    where d.dead_letter_id = any (v_ids)
    order by d.consumer, d.lane_id, d.arrival
    on conflict (consumer, lane_id) do update
    -- Not out of the hands of a worker that has leased it (process_inbox_batch).
    set due = case when k.leased_to is not null and not k.held then greatest(k.due, excluded.due) else excluded.due end,
        message_id = excluded.message_id, attempts = 0, reason = 0, held = false
    where not k.held or exists (
        select from wh_inbox_dead_letter d
        where d.dead_letter_id = any (v_ids) and d.consumer = k.consumer and d.message_id = k.message_id);
    with given_back as (
        delete from wh_inbox_dead_letter d where d.dead_letter_id = any (v_ids) returning d.*
    ), kept as (
        insert into wh_inbox (arrival, span_id, received_at, lane_id, stream_id, message_id, correlation_id, causation_id,
            trace_id, retried, consumer, trace_flags, source, type_name, content_type, metadata, payload)
        overriding system value
        select d.arrival, d.span_id, d.received_at, d.lane_id, d.stream_id, d.message_id, d.correlation_id,
            d.causation_id, d.trace_id, d.retried + 1, d.consumer, d.trace_flags, d.source, d.type_name, d.content_type,
            d.metadata, d.payload
        from given_back d
        returning 1
    )
    select count(*) into retried from kept;
end
$$;
