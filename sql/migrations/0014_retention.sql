-- Streams are truncated by operators, and say where they begin since; workers of the inbox that keep no session.
--
-- Invariants
-- - A row of wh_event_store is deleted by truncate_stream and overwritten by erase_events, by nothing else; the newest
--   event of a stream stays, because it carries the stream's last numbers.
-- - What is missing at a stream's beginning has a tombstone, written in the transaction that deleted it.
create table @schema@.wh_tombstone (
    first_version int8 not null check (first_version > 1), -- the first event that is kept
    events int8 not null,                                  -- deleted since ever
    truncated_at timestamptz not null default clock_timestamp(),
    stream_id uuid primary key,
    note text not null default '' check (octet_length(note) <= 1024) -- where the archive is
);

-- Whoever reads events has to be told of it, also a program of the version before.
do $$
declare
    v_reader oid;
begin
    for v_reader in
        select distinct a.grantee
        from pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) a
        where c.oid = '@schema@.wh_event_store'::regclass and a.privilege_type = 'SELECT' and a.grantee <> c.relowner
    loop
        execute format('grant select on @schema@.wh_tombstone to %s',
            case v_reader when 0 then 'public' else v_reader::regrole::text end);
    end loop;
end
$$;

-- A lane in the hands of a worker that keeps no session (process_inbox_batch): `due` is the end of its lease, and the
-- bodies up to this arrival are what it was handed, but for what an operator has given back meanwhile: so many are in hand.
alter table @schema@.wh_inbox_parked
    add column leased_through int8, add column leased_to uuid, add column leased_rows int4;
