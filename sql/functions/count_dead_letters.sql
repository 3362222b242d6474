-- count_dead_letters: how many dead letters of each kind there are: one row a destination, type, reason and fingerprint of
-- the error, the most frequent first.
-- in: the filter (see wh_match_dead_letters); p_rows_max: kinds, 1 to 10,000. At most 10,000 dead letters by id are
--     looked at after p_after: with more of them, ask again from `last_id` of the highest
-- out: dead_letters, how many of them hold their stream, first and last time, highest id, the text of one
-- locks: none    cost: one pass over what matches
create or replace function @schema@.count_dead_letters(
    p_all bool default false, p_ids int8[] default null, p_destination text default null, p_type text default null,
    p_reason int2 default null, p_fingerprint text default null, p_stream uuid default null,
    p_dead_from timestamptz default null, p_dead_before timestamptz default null, p_after int8 default 0,
    p_rows_max int4 default 100)
returns table (
    destination text, type_name text, reason int2, error_fingerprint text, dead_letters int8, holding int8,
    first_at timestamptz, last_at timestamptz, last_id int8, error text)
language sql stable
as $$
    select d.destination, d.type_name, d.reason, d.error_fingerprint, count(*), count(k.lane_id), min(d.dead_at),
        max(d.dead_at), max(d.dead_letter_id), min(d.error)
    from @schema@.wh_match_dead_letters(p_all, p_ids, p_destination, p_type, p_reason, p_fingerprint, p_stream,
        p_dead_from, p_dead_before, p_after, 10000) m
    join @schema@.wh_dead_letter d on d.dead_letter_id = m.dead_letter_id
    left join @schema@.wh_parked k
        on k.lane_id = d.lane_id and k.destination = d.destination and k.held and k.stream_seq = d.stream_seq
    group by d.destination, d.type_name, d.reason, d.error_fingerprint
    order by count(*) desc, max(d.dead_letter_id)
    limit p_rows_max
$$;
