-- summarize_events_from: brings the event store's BRIN indexes up to its newest full range of pages, so that a look by position
-- or id reads what it is for and not everything since the last autovacuum. For who follows: the next call goes on where this one
-- ended, and costs what has come since, whatever the store has.
-- in: p_from: what the last call answered; null at first: everything is looked through
-- out: the page up to which all is summarized; p_from where somebody does it right now, or the table is being vacuumed
-- the newest pages are left: a row that is written to a range that is summarized has to write the index as well
-- runs as the tables' owner, because only the owner may
-- locks: wh_event_store (SHARE UPDATE EXCLUSIVE, without waiting: it holds up no insert, no read)
-- cost: each new range of 32 pages is read once for each of the two indexes, mostly from memory; 256 of them at most, but for the
--     first call
create or replace function @schema@.summarize_events_from(p_from int8) returns int8
language plpgsql volatile security definer
set search_path = @schema@, pg_temp
as $$
declare
    v_end int8 := (pg_relation_size('wh_event_store') / current_setting('block_size')::int8 - 8) / 32 * 32;
    v_at int8 := least(coalesce(p_from, 0), v_end) / 32 * 32;
begin
    if v_at >= v_end then
        return p_from;
    end if;
    lock table wh_event_store in share update exclusive mode nowait;
    if p_from is null then
        perform brin_summarize_new_values('wh_event_store_position'), brin_summarize_new_values('wh_event_store_xid');
        return v_end;
    end if;
    v_end := least(v_end, v_at + 32 * 256);
    while v_at < v_end loop
        perform brin_summarize_range('wh_event_store_position', v_at), brin_summarize_range('wh_event_store_xid', v_at);
        v_at := v_at + 32;
    end loop;
    return v_end;
exception
    when lock_not_available then
        return p_from;
end
$$;
revoke execute on function @schema@.summarize_events_from(int8) from public;
