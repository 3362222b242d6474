-- unpark_inbox: lets lanes go on after their head has gone: one of which nothing is kept is free, another one is due now.
-- in: p_consumer; p_lane_ids    out: whether it is free, an element a lane, in input order; true also for one that was
--     not parked. A lane that is held stays held: false
-- locks: the rows of wh_inbox_parked, by ascending lane; what is kept is looked at in a later statement, since an
--     operator may have given something back. The caller holds the lanes' locks
--     Beside other calls for other lanes in one transaction: lock_inbox first, for all of them
-- cost: two probes a lane
create or replace function @schema@.unpark_inbox(p_consumer int2, p_lane_ids uuid[]) returns bool[]
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    perform from wh_inbox_parked k
    where k.consumer = p_consumer and k.lane_id = any (p_lane_ids)
    order by k.lane_id
    for update;
    delete from wh_inbox_parked k
    where k.consumer = p_consumer and k.lane_id = any (p_lane_ids) and not k.held
        and not exists (select from wh_inbox i where i.consumer = k.consumer and i.lane_id = k.lane_id);
    update wh_inbox_parked k
    set due = clock_timestamp(), attempts = 0, reason = 0, error = '', error_cut = false, leased_to = null,
        leased_through = null, leased_rows = null
    where k.consumer = p_consumer and k.lane_id = any (p_lane_ids) and not k.held;
    return coalesce((
        select array_agg(not exists (
            select from wh_inbox_parked k where k.consumer = p_consumer and k.lane_id = l.lane_id) order by l.turn)
        from unnest(p_lane_ids) with ordinality l(lane_id, turn)), '{}');
end
$$;
