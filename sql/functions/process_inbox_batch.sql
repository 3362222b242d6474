-- process_inbox_batch: one call, one transaction, everything a worker in any language has to say of what it receives: what
-- it has handled, what failed, what is new; and what it is to handle next. It needs no session: it works through a pooler,
-- and beside engines that handle the same consumer.
--
--     -- what a broker has delivered: settle it there after the commit, busy ones (2) excepted
--     select message_id, state from corelane.process_inbox_batch('018f…01', 1::int2, p_max_lanes => 0,
--         p_new_messages => array['018f…aa']::uuid[], p_new_stream_ids => array['018f…10']::uuid[],
--         p_new_types => array['OrderPaid'], p_new_payloads => array['\x7b7d'::bytea], p_new_source => 'orders')
--     where source = 'new';
--     -- work, in a transaction of its own; then handle each, and say so in the transaction of its effects
--     select * from corelane.process_inbox_batch('018f…01', 1::int2) where source = 'inbox';
--     begin; … your own rows, store_outbox_messages …
--     select * from corelane.process_inbox_batch('018f…01', 1::int2, p_completions => array['018f…aa']::uuid[]);
--     commit;
--
-- in: p_worker: an id of the worker's own, new each time it starts; p_consumer: see consumer_number
--     p_completions: handled, with their effects in this transaction
--     p_failures, with p_failure_reasons and p_failure_errors (null: 99, and no text), p_attempts_max, p_retry_base_ms,
--     p_retry_cap_ms: as wh_fail_work; of a lane only the first counts; p_hold: a lane waits behind a message that dies
--     p_renewals: still being handled: their lanes' leases begin anew, as they do by each completion
--     p_new_…, an element a delivery, in the order of arrival: see keep_inbox; p_new_source: where they came from
--     p_max_lanes (0 hands nothing out, at most 1,000), p_max_rows, p_max_bytes: as claim_inbox; p_lease_seconds
-- out: a row `new` for each delivery, in order, with its state: 0 stored, 1 a duplicate, 2 busy (another session handles
--     its lane: do not settle it); then a row `call`: completed, failed (dead ones included), unknown (failures and
--     renewals that are not this worker's any more), more (something further may be due); then a row `inbox` for each
--     message handed out, lane after lane, in each in the order of arrival
-- lease: a lane is handed to one worker, until all that it was handed is decided, one of it has failed, or the lease is
--     over; then it comes again, to whoever asks. What arrives meanwhile stays behind
-- once: a completion of what is not this worker's any more, or is gone, is an error, CL040 (`detail`: the message): the
--     effects in its transaction are rolled back with it. Somebody else has them, or will
-- errors: 22023 for what is out of its range, by name, and at REPEATABLE READ or SERIALIZABLE; 55P03 where somebody stores
--     in a stream of this worker's at this moment: run the transaction again; those of keep_inbox
-- locks: lanes (to the end of the transaction, by trying); rows of wh_inbox_parked, by ascending lane in one pass, or by
--     trying; rows of wh_inbox_seen and wh_inbox: commit before handling, and call once a transaction
-- cost: a constant number of statements; a probe or two a message, an update a lane
create or replace function @schema@.process_inbox_batch(
    p_worker uuid, p_consumer int2, p_completions uuid[] default '{}', p_failures uuid[] default '{}',
    p_failure_reasons int4[] default null, p_failure_errors text[] default null, p_renewals uuid[] default '{}',
    p_new_messages uuid[] default '{}', p_new_stream_ids uuid[] default '{}', p_new_types text[] default '{}',
    p_new_payloads bytea[] default '{}', p_new_source text default '', p_new_content_types text[] default null,
    p_new_metadata bytea[] default null, p_new_correlation_ids uuid[] default null,
    p_new_causation_ids uuid[] default null, p_new_trace_ids uuid[] default null, p_new_span_ids int8[] default null,
    p_new_trace_flags int2[] default null, p_max_lanes int4 default 100, p_max_rows int4 default 200,
    p_max_bytes int8 default 8388608, p_lease_seconds int4 default 30, p_attempts_max int4 default 10,
    p_retry_base_ms int8 default 30000, p_retry_cap_ms int8 default 300000, p_hold bool default false)
returns table (
    source text, message_id uuid, state int2, completed int4, failed int4, unknown int4, more bool, lane_id uuid,
    stream_id uuid, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8, trace_flags int2,
    received_at timestamptz, attempts int4, came_from text, type_name text, content_type text, metadata bytea,
    payload bytea)
language plpgsql volatile
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_lease constant interval := p_lease_seconds * interval '1 second';
    v_reported constant uuid[] := coalesce(p_completions, '{}') || coalesce(p_failures, '{}') || coalesce(p_renewals, '{}');
    v_states int2[];
    v_new_lanes uuid[];
    v_row record;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception 'process_inbox_batch needs READ COMMITTED: what was decided before the lock must be seen'
            using errcode = '22023';
    end if;
    if p_worker is null or p_consumer is null then
        raise exception 'p_worker and p_consumer must not be null' using errcode = '22023';
    end if;
    perform wh_require('p_max_lanes', p_max_lanes, 0, 1000);
    perform wh_require('p_max_rows', p_max_rows, 1, 10000);
    perform wh_require('p_max_bytes', p_max_bytes, 1, 1073741824);
    perform wh_require('p_lease_seconds', p_lease_seconds, 1, 3600);
    perform wh_require('length of ' || a.name, coalesce(a.length, 0), 0, 10000)
    from (values ('p_completions', cardinality(p_completions)), ('p_failures', cardinality(p_failures)),
        ('p_renewals', cardinality(p_renewals)), ('p_new_messages', cardinality(p_new_messages))) a(name, length);

    if cardinality(v_reported) > 0 and cardinality(p_new_messages) > 0 then
        -- The lanes of both in one pass: an operator takes them in this order too. Whatever was received before is freed
        -- again below.
        v_new_lanes := array(
            select l.lane_id
            from (
                select distinct coalesce(m.stream_id, wh_lane(m.message_id)) as lane_id
                from unnest(p_new_messages, p_new_stream_ids) m(message_id, stream_id)
                where m.message_id is not null offset 0
            ) l
            where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, l.lane_id)));
        perform lock_inbox(p_consumer, coalesce(array_agg(l.lane_id), '{}'), coalesce(array_agg(l.lane_id), '{}'))
        from (
            select u.lane_id from unnest(v_new_lanes) u(lane_id)
            union
            select r.lane_id
            from (
                select distinct i.lane_id from wh_inbox i
                where i.consumer = p_consumer and i.message_id = any (v_reported) offset 0
            ) r
            where pg_try_advisory_xact_lock(wh_lock_class(0), wh_inbox_key(p_consumer, r.lane_id))
        ) l;
    end if;
    select d.completed, d.failed, d.unknown into completed, failed, unknown
    from wh_decide_inbox(p_worker, p_consumer, p_completions, p_failures, p_failure_reasons, p_failure_errors,
        p_renewals, v_lease, p_attempts_max, p_retry_base_ms, p_retry_cap_ms, p_hold) d;

    if coalesce(cardinality(p_new_messages), 0) > 0 then
        v_states := wh_receive_inbox(p_consumer, p_new_messages, p_new_stream_ids, p_new_types, p_new_payloads,
            p_new_source, p_new_content_types, p_new_metadata, p_new_correlation_ids, p_new_causation_ids,
            p_new_trace_ids, p_new_span_ids, p_new_trace_flags);
        delete from wh_inbox_parked k
        where k.consumer = p_consumer and k.lane_id = any (v_new_lanes) and not k.held
            and not exists (select from wh_inbox i where i.consumer = k.consumer and i.lane_id = k.lane_id);
        return query
        select 'new', n.message_id, n.state, null::int4, null::int4, null::int4, null::bool, null::uuid, null::uuid,
            null::uuid, null::uuid, null::uuid, null::int8, null::int2, null::timestamptz, null::int4, null::text,
            null::text, null::text, null::bytea, null::bytea
        from unnest(p_new_messages, v_states) with ordinality n(message_id, state, turn)
        order by n.turn;
    end if;

    select l.messages, l.more into v_row
    from wh_lease_inbox(p_worker, p_consumer, v_lease, p_max_lanes, p_max_rows, p_max_bytes) l;
    source := 'call';
    more := v_row.more;
    return next;
    return query
    select 'inbox', i.message_id, null::int2, null::int4, null::int4, null::int4, null::bool, i.lane_id, i.stream_id,
        i.correlation_id, i.causation_id, i.trace_id, i.span_id, i.trace_flags, i.received_at,
        case when k.message_id = i.message_id then k.attempts else 0 end, i.source, i.type_name, i.content_type,
        i.metadata, i.payload
    from unnest(v_row.messages) with ordinality m(message_id, turn)
    join wh_inbox i on i.consumer = p_consumer and i.message_id = m.message_id
    join wh_inbox_parked k on k.consumer = p_consumer and k.lane_id = i.lane_id
    order by m.turn;
end
$$;
