-- expect_versions: goes on only if streams have the versions that the caller expects, and keeps them so until the end of
-- the caller's transaction. Messages that are stored in it afterwards come right behind. append_events does both.
--
--     begin;
--     select corelane.expect_versions(array['018f…aa', '018f…ab']::uuid[], array[7, null]::int8[]);
--     select * from corelane.store_outbox_messages(…); -- event 8 of the first stream
--     commit;
--
-- in: stream_ids: all streams that the transaction will store on; expected_versions: of each the version of its last
--     event, 0 where it must have none, null for any. A stream that is named twice is expected to have both.
-- out: nothing
-- errors: CL010 where a stream has another version, with the stream, both versions in the text and, for programs, in the
--     detail (`stream_id=… expected=… found=…`); of several the first in the order given. 22023 for arrays of unequal
--     length, a null or nil stream, or a negative version. 40001 at REPEATABLE READ or SERIALIZABLE where the snapshot
--     does not show the stream's last event: run the transaction again.
-- locks: as store_outbox_messages: the partitions of all streams (shared, ascending), then the streams (exclusive,
--     ascending, waiting); over 256 streams the partitions exclusively. So name all of them in one call.
-- cost: a look-up a stream that something is expected of
create or replace function @schema@.expect_versions(stream_ids uuid[], expected_versions int8[]) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
    v_partition_count int4;
    v_wrong record;
    v_stream uuid[];
    v_seq int8[];
    v_version int8[];
begin
    if cardinality(stream_ids) is distinct from cardinality(expected_versions) then
        raise exception 'stream_ids has % elements, expected_versions has %: give each stream one', 
            coalesce(cardinality(stream_ids), 0), coalesce(cardinality(expected_versions), 0) using errcode = '22023';
    end if;
    select s.turn, s.id, s.expected into v_wrong
    from unnest(stream_ids, expected_versions) with ordinality s(id, expected, turn)
    where s.id is null or s.id = '00000000-0000-0000-0000-000000000000' or s.expected < 0
    order by s.turn limit 1;
    if found then
        raise exception 'element %: stream % with expected version %: a stream has an id that is not nil, and a version of 0 or more',
            v_wrong.turn, v_wrong.id, v_wrong.expected using errcode = '22023';
    end if;
    select i.partition_count into strict v_partition_count from wh_installation i;
    if (select count(*) from (select distinct s.id from unnest(stream_ids) s(id) limit 257) s) > 256 then
        perform pg_advisory_xact_lock(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition from unnest(stream_ids) s(id) order by 1
        ) p;
    else
        perform pg_advisory_xact_lock_shared(wh_lock_class(1), p.partition) from (
            select distinct compute_partition(s.id, v_partition_count) as partition from unnest(stream_ids) s(id) order by 1
        ) p;
        perform pg_advisory_xact_lock(wh_lock_class(2), s.key) from (
            select distinct wh_stream_key(s.id) as key from unnest(stream_ids) s(id) order by 1
        ) s;
    end if;

    -- A later statement than the locks.
    select array_agg(s.id), array_agg(s.version), array_agg(greatest(s.event_seq,
        (select o.stream_seq from wh_outbox_0 o where o.lane_id = s.id order by o.stream_seq desc limit 1),
        (select o.stream_seq from wh_outbox_1 o where o.lane_id = s.id order by o.stream_seq desc limit 1),
        (select o.stream_seq from wh_outbox_2 o where o.lane_id = s.id order by o.stream_seq desc limit 1),
        (select c.last_seq from wh_stream c where c.stream_id = s.id)))
    into v_stream, v_version, v_seq
    from (
        select d.id, coalesce(e.version, 0) as version, coalesce(e.stream_seq, 0) as event_seq
        from (select distinct s.id from unnest(stream_ids, expected_versions) s(id, expected) where s.expected is not null) d
        left join lateral (
            select e.version, e.stream_seq from wh_event_store e where e.stream_id = d.id order by e.version desc limit 1
        ) e on true
    ) s;
    if v_stream is not null and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        perform wh_prove_last(v_stream, v_seq, v_version);
    end if;
    select s.id, s.expected, f.version into v_wrong
    from unnest(stream_ids, expected_versions) with ordinality s(id, expected, turn)
    join unnest(v_stream, v_version) f(id, version) on f.id = s.id
    where s.expected <> f.version
    order by s.turn limit 1;
    if found then
        raise exception 'stream % is at version %, expected was %', v_wrong.id, v_wrong.version, v_wrong.expected
            using errcode = 'CL010', hint = 'Read the stream and decide anew.',
            detail = format('stream_id=%s expected=%s found=%s', v_wrong.id, v_wrong.expected, v_wrong.version);
    end if;
end
$$;
