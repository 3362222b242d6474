-- wh_match_in_hand: the references that the elements of a worker's report name, of those that it has in hand and has not
-- decided. Completions and failures begin with it.
-- in: p_incarnation; p_message_ids; p_destinations (null, or null elements: every destination of the message)
-- out: a row a reference and element that names it; turn: the element's place, from 1. One without a row names nothing
-- Inlined: that is why it carries no search_path of its own.
-- locks: none    cost: a probe an element
create or replace function @schema@.wh_match_in_hand(p_incarnation int4, p_message_ids uuid[], p_destinations text[])
returns table (
    turn int8, message_id uuid, lane_id uuid, destination text, "partition" int4, stream_seq int8, version int8, beside bool)
language sql stable
as $$
    select w.turn, h.message_id, h.lane_id, h.destination, h.partition, h.stream_seq, h.version, h.beside
    from unnest(p_message_ids, p_destinations) with ordinality w(message_id, destination, turn)
    join @schema@.wh_handed_out h on h.incarnation = p_incarnation and h.message_id = w.message_id
        and (w.destination is null or h.destination = w.destination) and not h.decided
$$;
