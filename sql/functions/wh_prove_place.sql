-- wh_prove_place: makes sure, with this transaction's commit, that transaction ids below one are never given again: after a
-- crash they are given from the last one on that is in the WAL.
-- in: p_xmax (what is read ends below it)
-- out: whether it is so; false: this transaction had its id before, and says nothing
-- locks: none    cost: a message in the WAL (logical decoding passes it over), and a commit that waits for the disk
create or replace function @schema@.wh_prove_place(p_xmax xid8) returns bool
language plpgsql volatile
as $$
begin
    if pg_current_xact_id() < p_xmax then
        return false;
    end if;
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    perform pg_logical_emit_message(true, 'corelane', '');
    return true;
end
$$;
