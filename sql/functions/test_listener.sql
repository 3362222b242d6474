-- test_listener: says something on the channel that this connection alone listens to: one that does not hear it is deaf.
-- in: p_word    out: nothing; the notification `self:` and the word
-- locks: none    cost: one notification
-- needs the connection that called listen_instance
create or replace function @schema@.test_listener(p_word int8) returns void
language sql volatile
as $$
    select pg_notify(@schema@.wh_channel() || '_' || pg_backend_pid(), 'self:' || p_word)
$$;
