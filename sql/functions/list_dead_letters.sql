-- list_dead_letters: a page of the dead letters that a filter names, without their bodies.
-- in: the filter (see wh_match_dead_letters); p_after: the last id of the page before; p_rows_max: 1 to 10,000
-- out: a row a dead letter, by id. `holds`: its stream waits behind it; `is_stored`: it can be retried (somebody may have
--     deleted the message); `retried`: how often an operator has given it back before
-- locks: none    cost: see wh_match_dead_letters; a probe a row
create or replace function @schema@.list_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_destination text default null, p_type text default null,
    p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 100)
returns table (
    dead_letter_id int8, dead_at timestamptz, destination text, lane_id uuid, stream_id uuid, stream_seq int8,
    version int8, message_id uuid, type_name text, attempts int4, retried int4, reason int2, error text,
    error_cut bool, error_fingerprint text, holds bool, is_stored bool)
language sql stable
as $$
    select d.dead_letter_id, d.dead_at, d.destination, d.lane_id, d.stream_id, d.stream_seq, d.version, d.message_id,
        d.type_name, d.attempts, d.retried, d.reason, d.error, d.error_cut, d.error_fingerprint,
        exists (select from @schema@.wh_parked k where k.lane_id = d.lane_id and k.destination = d.destination
            and k.held and k.stream_seq = d.stream_seq),
        case when d.version = 0 or d.payload is not null then d.payload is not null else exists (
            select from @schema@.wh_event_store e where e.stream_id = d.lane_id and e.version = d.version) end
    from @schema@.wh_match_dead_letters(p_all, p_ids, p_destination, p_type, p_reason, p_fingerprint, p_stream,
        p_dead_from, p_dead_before, p_after, p_rows_max) m
    join @schema@.wh_dead_letter d on d.dead_letter_id = m.dead_letter_id
    order by d.dead_letter_id
$$;
