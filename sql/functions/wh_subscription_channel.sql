-- wh_subscription_channel: the NOTIFY channel of this schema's subscriptions.
-- in: nothing    locks: none    cost: nothing to speak of
-- out: a name. Payloads: the number of a subscription whose members or partitions have changed; `events`: some were
--     appended
create or replace function @schema@.wh_subscription_channel() returns text
language sql stable
as $$
    select 'corelane_' || '@schema@'::pg_catalog.regnamespace::pg_catalog.oid::pg_catalog.text || '_events'
$$;
