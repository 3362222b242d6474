-- listen_instance: this connection hears what is said on the schema's channel from here on, and on one of its own, which
-- bears its pid (test_listener).
-- in: nothing    out: nothing    locks: none    cost: a look into the list of listeners at each NOTIFY
-- needs a direct connection: behind a pooler nobody would be there to hear
create or replace function @schema@.listen_instance() returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    execute format('listen %I', wh_channel());
    execute format('listen %I', wh_channel() || '_' || pg_backend_pid());
end
$$;
