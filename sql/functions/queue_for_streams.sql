-- queue_for_streams: takes a place in the queue for streams that a shard's flush has found locked again and again: it only
-- tries, and whoever stores on a stream without a pause leaves no gap to find. The flush follows in the same statement.
-- in: the flush's p_incarnation, p_shard, p_partitions; p_streams, p_stream_partitions: those streams, some 16 at most
--     p_patience_ms: how long it may be waited for one lock; a twentieth of it where nobody else waits for one of the
--     streams: then one holds it for long, and the flush has other streams to store
-- out: whether all of them are locked now, until the transaction ends
-- locks: as store_shard_messages and in its order, but that the partitions of the streams (shared, ascending) and the
--     streams (exclusive, by key) are waited for, as every other caller does; given back where the time is over
-- cost: one look at pg_locks
create or replace function @schema@.queue_for_streams(
    p_incarnation int4, p_shard int2, p_partitions int4[], p_streams uuid[], p_stream_partitions int4[],
    p_patience_ms int4)
returns bool
language plpgsql volatile
as $$
declare
    v_lock_timeout constant text := current_setting('lock_timeout');
    v_queued bool;
begin
    perform pg_advisory_xact_lock_shared(@schema@.wh_lock_class(3), p_incarnation);
    perform pg_advisory_xact_lock(@schema@.wh_lock_class(7), @schema@.wh_flush_key(p_incarnation, p_shard));
    perform pg_advisory_xact_lock(@schema@.wh_lock_class(5), p) from unnest(p_partitions) p;
    -- Keys of advisory locks are shown as oids, which have no sign.
    v_queued := exists (
        select
        from pg_locks l
        join unnest(p_streams) s(id) on l.objid = (@schema@.wh_stream_key(s.id)::int8 & 4294967295)::oid
        where l.locktype = 'advisory' and not l.granted and l.objsubid = 2
            and l.classid = (@schema@.wh_lock_class(2)::int8 & 4294967295)::oid
            and l.database = (select d.oid from pg_database d where d.datname = current_database()));
    begin
        perform set_config('lock_timeout',
            greatest(1, case when v_queued then p_patience_ms else p_patience_ms / 20 end)::text, true);
        perform pg_advisory_xact_lock_shared(@schema@.wh_lock_class(1), p.partition)
        from (select distinct p as partition from unnest(p_stream_partitions) p order by 1) p;
        perform pg_advisory_xact_lock(@schema@.wh_lock_class(2), s.key)
        from (select distinct @schema@.wh_stream_key(s) as key from unnest(p_streams) s order by 1) s;
    exception when lock_not_available then
        return false;
    end;
    perform set_config('lock_timeout', v_lock_timeout, true);
    return true;
end
$$;
