-- remove_subscription: drops a subscription and where it stood. Its members find that they are none any more.
-- in: p_name    out: whether there was one    locks: its rows    cost: a row a partition
create or replace function @schema@.remove_subscription(p_name text) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    delete from wh_subscription s where s.name = p_name;
    return found;
end
$$;
