-- list_inbox_dead_letters: a page of the inbox's dead letters that a filter names, without their bodies.
-- in: the filter (see wh_match_inbox_dead_letters); p_after: the last id of the page before; p_rows_max: 1 to 10,000
-- out: a row a dead letter, by id. `holds`: its lane waits behind it; `retried`: how often it was given back before
-- locks: none    cost: see wh_match_inbox_dead_letters; a probe a row
create or replace function @schema@.list_inbox_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_consumer text default null, p_source text default null,
    p_type text default null, p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 100)
returns table (
    dead_letter_id int8, dead_at timestamptz, consumer text, source text, lane_id uuid, stream_id uuid,
    message_id uuid, received_at timestamptz, type_name text, attempts int4, retried int4, reason int2, error text,
    error_cut bool, error_fingerprint text, holds bool)
language sql stable
as $$
    select d.dead_letter_id, d.dead_at, c.name, d.source, d.lane_id, d.stream_id, d.message_id, d.received_at,
        d.type_name, d.attempts, d.retried, d.reason, d.error, d.error_cut, d.error_fingerprint,
        exists (select from @schema@.wh_inbox_parked k where k.consumer = d.consumer and k.lane_id = d.lane_id
            and k.held and k.message_id = d.message_id)
    from @schema@.wh_match_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type, p_reason, p_fingerprint,
        p_stream, p_dead_from, p_dead_before, p_after, p_rows_max) m
    join @schema@.wh_inbox_dead_letter d on d.dead_letter_id = m.dead_letter_id
    join @schema@.wh_consumer c on c.consumer = d.consumer
    order by d.dead_letter_id
$$;
