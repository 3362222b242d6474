-- withdraw_instance: the incarnation takes no partitions any more: others count it no longer when they share. It still
-- stores, and still owns what it has not handed over.
-- in: p_incarnation    out: whether it is alive
-- locks: its own row    cost: one update; the others are told when it hands over
create or replace function @schema@.withdraw_instance(p_incarnation int4) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    update wh_instance i set owns = false where i.number = p_incarnation and i.state = 0;
    return found;
end
$$;
