-- settle: a shard's outcomes. One transaction: what did not go well is beside the log or in the dead letters when
-- the cursor passes it. All of it can be sent twice.
-- in: p_incarnation, p_shard, p_ownership (the set of partitions the cursor was made for), p_epoch (the life of the
--         server all of it stems from: in another one, whose transaction ids mean others, nothing is written and
--         the answer names it; null: any), p_cursor (or null)
--     park: lanes that wait (due in milliseconds from now by the database's clock; in a hundred years, 3155760000000:
--         held until an operator lets it go on); the last of two wins
--     spill: references to keep beside the log; the body of a message of wh_outbox is copied. Their lanes are
--         parked, due now, if they are not
--     drained: kept references that are acknowledged     dead: references that go to the dead letters
--     unpark: lanes whose row goes if nothing of theirs is kept beside the log
-- lanes: a program of schema version 1 knows a message without stream by its id instead of by wh_lane, and names it so
--     here as well: its body, of number 1, is found by either (goes at the earliest with schema version 3)
-- out: fenced (then nothing was written), epoch, unparked (in the order of unpark: whether the row is gone)
-- locks: fence of the incarnation (shared); state and owners are read in a later statement. Whoever marks the
--     incarnation dead takes it exclusively, and so reads either all of this or none
-- fence: an incarnation that is not alive, or does not own a partition it writes about, writes nothing
-- durability: a cursor alone commits asynchronously (a lost one costs copies, not messages), everything else waits
-- cost: one statement a kind that is present
create or replace function @schema@.settle(
    p_incarnation int4, p_shard int2, p_ownership int8, p_epoch uuid, p_cursor pg_snapshot,
    p_park_lane uuid[], p_park_destination text[], p_park_partition int4[], p_park_seq int8[], p_park_attempts int4[],
    p_park_reason int2[], p_park_error text[], p_park_error_cut bool[], p_park_due_in_ms int8[],
    p_spill_lane uuid[], p_spill_destination text[], p_spill_partition int4[], p_spill_seq int8[],
    p_spill_version int8[],
    p_drained_lane uuid[], p_drained_destination text[], p_drained_partition int4[], p_drained_seq int8[],
    p_dead_lane uuid[], p_dead_destination text[], p_dead_partition int4[], p_dead_seq int8[], p_dead_version int8[],
    p_dead_attempts int4[], p_dead_reason int2[], p_dead_error text[], p_dead_error_cut bool[],
    p_unpark_lane uuid[], p_unpark_destination text[], p_unpark_partition int4[],
    out fenced bool, out epoch uuid, out unparked bool[])
language plpgsql volatile
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    v_only_cursor constant bool := cardinality(p_park_lane) + cardinality(p_spill_lane) + cardinality(p_drained_lane)
        + cardinality(p_dead_lane) + cardinality(p_unpark_lane) = 0;
begin
    perform pg_advisory_xact_lock_shared(@schema@.wh_lock_class(3), p_incarnation);

    -- A later statement than the lock.
    select (select e.token from @schema@.wh_epoch e),
        not exists (select from @schema@.wh_instance i where i.number = p_incarnation and i.state = 0)
        or (not v_only_cursor and exists (
            select
            from unnest(p_park_partition || p_spill_partition || p_drained_partition || p_dead_partition
                || p_unpark_partition) w(partition)
            left join @schema@.wh_partition p on p.partition = w.partition
            where p.owner is distinct from p_incarnation))
    into epoch, fenced;
    if fenced then
        return;
    end if;
    if epoch is null then
        epoch := @schema@.wh_epoch_token();
    end if;
    unparked := '{}';
    if p_epoch <> epoch then
        return;
    end if;

    if v_only_cursor then
        perform set_config('synchronous_commit', 'off', true);
    else
        if cardinality(p_spill_lane) > 0 then
            -- A message of wh_outbox that somebody has deleted is kept without its body: whoever drains the lane finds
            -- it missing, and buries it. Refused, it would hold up every outcome of the shard.
            insert into @schema@.wh_parked_reference (stream_seq, version, position, span_id, stored_at,
                lane_id, stream_id, message_id, correlation_id, causation_id, trace_id, partition, trace_flags,
                destination, type_name, content_type, metadata, payload)
            select distinct on (s.lane_id, s.destination, s.stream_seq) s.stream_seq, s.version, o.position, o.span_id,
                o.stored_at, s.lane_id, o.stream_id, o.message_id, o.correlation_id, o.causation_id, o.trace_id,
                s.partition, o.trace_flags, s.destination, o.type_name, o.content_type, o.metadata, o.payload
            from unnest(p_spill_lane, p_spill_destination, p_spill_partition, p_spill_seq, p_spill_version)
                s(lane_id, destination, partition, stream_seq, version)
            left join @schema@.wh_outbox o
                on s.version = 0 and o.stream_seq = s.stream_seq
                and o.lane_id = any (case s.stream_seq when 1 then array[s.lane_id, @schema@.wh_lane(s.lane_id)]
                    else array[s.lane_id] end)
                and (o.lane_id = s.lane_id or o.stream_id is null and o.message_id = s.lane_id)
            where not exists (
                    select from @schema@.wh_parked_reference k
                    where k.lane_id = s.lane_id and k.destination = s.destination and k.stream_seq = s.stream_seq)
                -- Buried before the last cursor, and read again since: an operator decides about it.
                and not exists (
                    select from @schema@.wh_dead_letter d
                    where d.lane_id = s.lane_id and d.destination = s.destination and d.stream_seq = s.stream_seq)
            order by s.lane_id, s.destination, s.stream_seq, o.lane_id <> s.lane_id
            on conflict do nothing;
        end if;

        if cardinality(p_park_lane) > 0 then
            insert into @schema@.wh_parked as k (stream_seq, due, lane_id, partition, attempts, reason, error_cut, held,
                destination, error)
            select distinct on (n.lane_id, n.destination) n.stream_seq,
                clock_timestamp() + n.due_in_ms * interval '1 millisecond', n.lane_id, n.partition, n.attempts,
                n.reason, n.error_cut, n.due_in_ms >= 3155760000000, n.destination, n.error
            from unnest(p_park_lane, p_park_destination, p_park_partition, p_park_seq, p_park_attempts, p_park_reason,
                p_park_error, p_park_error_cut, p_park_due_in_ms) with ordinality
                n(lane_id, destination, partition, stream_seq, attempts, reason, error, error_cut, due_in_ms, turn)
            order by n.lane_id, n.destination, n.turn desc
            on conflict (lane_id, destination) do update
            set stream_seq = excluded.stream_seq, due = excluded.due, partition = excluded.partition,
                attempts = excluded.attempts, reason = excluded.reason, error_cut = excluded.error_cut,
                held = excluded.held, error = excluded.error;
        end if;

        if cardinality(p_spill_lane) > 0 then
            -- A kept reference never stands without its lane's row, or the next owner would not find it: an unpark
            -- of an earlier load may have been committed since.
            insert into @schema@.wh_parked (stream_seq, due, lane_id, partition, attempts, reason, error_cut,
                destination, error)
            select distinct on (s.lane_id, s.destination) s.stream_seq, clock_timestamp(), s.lane_id, s.partition, 0, 0,
                false, s.destination, ''
            from unnest(p_spill_lane, p_spill_destination, p_spill_partition, p_spill_seq)
                s(lane_id, destination, partition, stream_seq)
            order by s.lane_id, s.destination, s.stream_seq
            on conflict (lane_id, destination) do nothing;
        end if;

        if cardinality(p_drained_lane) > 0 then
            delete from @schema@.wh_parked_reference k
            using unnest(p_drained_lane, p_drained_destination, p_drained_seq) d(lane_id, destination, stream_seq)
            where k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq;
        end if;

        if cardinality(p_dead_lane) > 0 then
            -- The body of an event stays where it is; that of another message comes along, from its segment or from
            -- beside the log.
            insert into @schema@.wh_dead_letter (stream_seq, version, position, span_id, stored_at, lane_id,
                stream_id, message_id, correlation_id, causation_id, trace_id, partition, attempts, trace_flags,
                reason, error_cut, destination, error, error_fingerprint, type_name, content_type, metadata, payload,
                retried)
            select distinct on (d.lane_id, d.destination, d.stream_seq) d.stream_seq, d.version,
                coalesce(e.position, o.position, k.position), coalesce(e.span_id, o.span_id, k.span_id),
                coalesce(e.stored_at, o.stored_at, k.stored_at), d.lane_id,
                coalesce(e.stream_id, o.stream_id, k.stream_id), coalesce(e.message_id, o.message_id, k.message_id),
                coalesce(e.correlation_id, o.correlation_id, k.correlation_id),
                coalesce(e.causation_id, o.causation_id, k.causation_id),
                coalesce(e.trace_id, o.trace_id, k.trace_id), d.partition, d.attempts,
                coalesce(e.trace_flags, o.trace_flags, k.trace_flags), d.reason, d.error_cut, d.destination, d.error,
                md5(regexp_replace(left(d.error, 512), '[0-9a-fA-F]{8,}|[0-9]+', '#', 'g')),
                coalesce(e.type_name, o.type_name, k.type_name),
                coalesce(e.content_type, o.content_type, k.content_type),
                coalesce(o.metadata, k.metadata), coalesce(o.payload, k.payload),
                coalesce(k.retried, 0)
            from unnest(p_dead_lane, p_dead_destination, p_dead_partition, p_dead_seq, p_dead_version,
                p_dead_attempts, p_dead_reason, p_dead_error, p_dead_error_cut) with ordinality
                d(lane_id, destination, partition, stream_seq, version, attempts, reason, error, error_cut, turn)
            left join @schema@.wh_event_store e
                on d.version > 0 and e.stream_id = d.lane_id and e.version = d.version
            left join @schema@.wh_outbox o
                on d.version = 0 and o.stream_seq = d.stream_seq
                and o.lane_id = any (case d.stream_seq when 1 then array[d.lane_id, @schema@.wh_lane(d.lane_id)]
                    else array[d.lane_id] end)
                and (o.lane_id = d.lane_id or o.stream_id is null and o.message_id = d.lane_id)
            left join @schema@.wh_parked_reference k
                on k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq
            order by d.lane_id, d.destination, d.stream_seq, d.turn, o.lane_id <> d.lane_id
            on conflict (lane_id, destination, stream_seq) do nothing;
            delete from @schema@.wh_parked_reference k
            using unnest(p_dead_lane, p_dead_destination, p_dead_seq) d(lane_id, destination, stream_seq)
            where k.lane_id = d.lane_id and k.destination = d.destination and k.stream_seq = d.stream_seq;
        end if;

        if cardinality(p_unpark_lane) > 0 then
            -- Whoever puts something beside the log for a lane writes its row: it is waited for, and found by the
            -- statement after this one.
            perform
            from @schema@.wh_parked k
            join unnest(p_unpark_lane, p_unpark_destination) u(lane_id, destination)
                on k.lane_id = u.lane_id and k.destination = u.destination
            order by k.lane_id, k.destination
            for update of k;
            delete from @schema@.wh_parked k
            using unnest(p_unpark_lane, p_unpark_destination) u(lane_id, destination)
            where k.lane_id = u.lane_id and k.destination = u.destination
                and not exists (
                    select from @schema@.wh_parked_reference r
                    where r.lane_id = u.lane_id and r.destination = u.destination);
            select array_agg(not exists (
                    select from @schema@.wh_parked k
                    where k.lane_id = u.lane_id and k.destination = u.destination) order by u.turn)
            into unparked
            from unnest(p_unpark_lane, p_unpark_destination) with ordinality u(lane_id, destination, turn);
        end if;
    end if;

    if p_cursor is not null then
        insert into @schema@.wh_cursor (ownership, incarnation, shard, resolved)
        values (p_ownership, p_incarnation, p_shard, p_cursor);
    end if;
end
$$;
