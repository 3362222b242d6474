-- find_duplicates: which ids a message without stream cannot have any more, because a message that is stored has it.
-- A flush that was refused for one of them asks once for all.
-- in: p_message_id: ids of the messages without stream    out: those that are taken, in no order
-- locks: none    cost: an index probe a segment and id
create or replace function @schema@.find_duplicates(p_message_id uuid[])
returns setof uuid
language sql stable
set jit = off
set enable_seqscan = off
as $$
    select m.id
    from unnest(p_message_id) m(id)
    -- The limit keeps it a probe an id, whatever the planner believes of the table.
    cross join lateral (
        select from @schema@.wh_outbox o where o.lane_id = @schema@.wh_lane(m.id) and o.stream_seq = 1 limit 1
    ) o
$$;
