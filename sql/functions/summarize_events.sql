-- summarize_events: brings the event store's BRIN indexes up to its newest page, so that a look by position or id reads what it
-- is for and not everything since the last autovacuum.
--
--     select summarize_events()
--
-- in: nothing
-- out: ranges of pages that were summarized; 0 also where somebody does it right now, or the table is being vacuumed
-- runs as the tables' owner, because only the owner may
-- locks: wh_event_store (SHARE UPDATE EXCLUSIVE, without waiting: it holds up no insert, no read)
-- cost: each new range of 32 pages is read once for each of the two indexes, mostly from memory; nothing else
create or replace function @schema@.summarize_events() returns int4
language plpgsql volatile security definer
set search_path = @schema@, pg_temp
as $$
begin
    lock table wh_event_store in share update exclusive mode nowait;
    return brin_summarize_new_values('wh_event_store_position') + brin_summarize_new_values('wh_event_store_xid');
exception
    when lock_not_available then
        return 0;
end
$$;
revoke execute on function @schema@.summarize_events() from public;
