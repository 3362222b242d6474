-- wh_prove_last: proves that the numbers a snapshot shows are the streams' last, or fails with 40001.
-- A transaction at REPEATABLE READ or SERIALIZABLE reads what was committed when it began, which may be before it got
-- the streams' locks; unique indexes and row locks look at what is committed now. So it tries to insert the next
-- number wherever another writer could have put it, and takes all of it back.
-- in: streams, with the last number and version that the snapshot shows    out: nothing
-- why it is enough: a number above `last_seq` was given to an event (then version + 1 is taken), to a message that
--     stands in a segment (then seq + 1 is taken there, or by an event), or to one whose segment was truncated
--     since (then rotation has written the stream's row in wh_stream before).
-- locks: held only inside; the streams' own are held by the caller
-- cost: five inserts a stream that roll back; nothing at READ COMMITTED, which does not call it
create or replace function @schema@.wh_prove_last(streams uuid[], last_seqs int8[], last_versions int8[]) returns void
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
    -- A row that was updated since the snapshot fails here with 40001 by itself. Not FOR KEY SHARE: an update of
    -- last_seq does not conflict with it.
    perform from wh_stream c where c.stream_id = any (streams) order by c.stream_id for share;
    insert into wh_stream (last_seq, stream_id)
    select 0, s.id from unnest(streams) s(id)
    where not exists (select from wh_stream c where c.stream_id = s.id);
    insert into wh_event_store (position, stream_seq, version, xid, stored_at, stream_id, message_id, partition,
        type_name, payload)
    select 0, s.last_seq + 1, s.last_version + 1, 0, now(), s.id, s.id, 0, '', ''
    from unnest(streams, last_seqs, last_versions) s(id, last_seq, last_version);
    insert into wh_outbox (position, stream_seq, xid, stored_at, lane_id, message_id, partition, segment, type_name,
        payload)
    select 0, s.last_seq + 1, 0, now(), s.id, s.id, 0, k, '', ''
    from unnest(streams, last_seqs) s(id, last_seq), generate_series(0, 2) k;
    raise exception 'nothing of this stays' using errcode = 'WH000';
exception
    when sqlstate 'WH000' then
        null;
    when unique_violation then
        raise exception 'another transaction has stored on a stream of this call since this one''s snapshot was taken'
            using errcode = '40001', hint = 'Run the transaction again, or use READ COMMITTED.';
end
$$;
