-- wh_channel: the NOTIFY channel of this schema: no other schema of the database is woken.
-- in: nothing    locks: none    cost: nothing to speak of
-- out: a name. Payloads: `members` (who owns what, or who may, has changed), `work:` and the number of the incarnation
--     that has stored messages for others (or nothing)
create or replace function @schema@.wh_channel() returns text
language sql stable
as $$
    select 'corelane_' || '@schema@'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.text
$$;
