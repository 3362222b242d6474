-- process_work_batch: one call, one transaction, everything a worker in any language has to say and wants to know: what
-- it has published, what failed, what is new; and what it is to publish next.
--
--     -- the first call registers the worker; the id is a new one each time the program starts
--     select * from corelane.process_work_batch('018f…01', 'billing', 'host-7', 4711);
--     -- the next one reports, stores an event, and asks for more
--     select * from corelane.process_work_batch('018f…01', 'billing', 'host-7', 4711,
--         p_outbox_completions => array['018f…aa', '018f…ab']::uuid[],
--         p_outbox_failures => array['018f…ac']::uuid[], p_outbox_failure_errors => array['refused'],
--         p_new_outbox_messages => array['018f…ad']::uuid[], p_new_outbox_stream_ids => array['018f…10']::uuid[],
--         p_new_outbox_types => array['OrderPaid'], p_new_outbox_payloads => array['\x7b7d'::bytea],
--         p_new_outbox_is_event => array[true], p_new_outbox_destinations => array['orders']);
--
-- in: p_instance_id, p_service_name, p_host_name, p_process_id: who calls; p_partition_count: refused if it is not the
--     installed one (null: not checked); p_lease_seconds: call again before they are over
--     p_max_streams_per_batch: 0 hands nothing out, and in a first call registers one that only stores; p_max_rows:
--     what may be in hand; p_max_rows_per_stream: of it, handed out at once of one stream and destination
--     p_outbox_completions, with _destinations and _statuses: see wh_complete_work
--     p_outbox_failures, with _destinations, _reasons and _errors; p_attempts_max, p_retry_base_ms, p_retry_cap_ms,
--     p_hold_destinations: see wh_fail_work
--     p_new_outbox_…: see store_outbox_messages
--     p_renew_outbox_lease_ids: still being worked on: a hand-over waits for them for another lease
--     p_inbox_…, p_new_inbox_messages: refused unless empty (0A000): what is received names its consumer, and has a call
--     of its own for the same transaction, process_inbox_batch
--     p_flags: the reference's numbers. 2 (Orphaned): everything in hand once more, for a caller that has lost an
--     answer. Without meaning here: 1, 4, 8, 16, 32, 64. Any other bit is refused (22023)
-- out: a row `stored` for each new message, in order, with its numbers; then a row `call`: lease_lost, members,
--     partitions (held), and how many references were completed, failed (dead ones included) and unknown; then a row
--     `outbox` for each message handed out, by position: publish those of one stream and destination in this order, and
--     leave those behind one that fails
-- errors: 22023 for what is out of its range, by name; an array may have 10,000 elements
-- lease_lost: the lease has ended, or somebody has ended it: only the new messages were stored. What is in hand is no
--     longer the caller's, and the id is used up: it goes on under a new one
-- steps, in the seed's order: completions, failures, stores (events into the event store), claims
-- in hand: what was handed out is not handed out again before it is decided, or given back, or the lease is over. What
--     this call stores is handed out by a later one: nobody may publish what is not committed
-- locks: the worker's fence (exclusively: its calls take turns); those of store_outbox_messages; see wh_hand_out. Held to
--     the end of the transaction: commit before publishing
-- cost: a constant number of statements
create or replace function @schema@.process_work_batch(
    p_instance_id uuid, p_service_name text, p_host_name text default '', p_process_id int4 default 0,
    p_partition_count int4 default null, p_lease_seconds int4 default 30, p_max_streams_per_batch int4 default 1000,
    p_outbox_completions uuid[] default '{}', p_outbox_completion_destinations text[] default null,
    p_outbox_completion_statuses int4[] default null,
    p_outbox_failures uuid[] default '{}', p_outbox_failure_destinations text[] default null,
    p_outbox_failure_reasons int4[] default null, p_outbox_failure_errors text[] default null,
    p_inbox_completions uuid[] default '{}', p_inbox_failures uuid[] default '{}',
    p_new_outbox_messages uuid[] default '{}', p_new_outbox_stream_ids uuid[] default '{}',
    p_new_outbox_types text[] default '{}', p_new_outbox_payloads bytea[] default '{}',
    p_new_outbox_is_event bool[] default '{}', p_new_outbox_destinations text[] default '{}',
    p_new_outbox_reference_messages int4[] default null, p_new_outbox_reference_destinations text[] default null,
    p_new_outbox_correlation_ids uuid[] default null, p_new_outbox_causation_ids uuid[] default null,
    p_new_outbox_trace_ids uuid[] default null, p_new_outbox_span_ids int8[] default null,
    p_new_outbox_trace_flags int2[] default null, p_new_outbox_content_types text[] default null,
    p_new_outbox_metadata bytea[] default null, p_new_outbox_dues timestamptz[] default null,
    p_new_inbox_messages uuid[] default '{}', p_renew_outbox_lease_ids uuid[] default '{}',
    p_renew_inbox_lease_ids uuid[] default '{}', p_flags int4 default 0, p_max_rows int4 default 1000,
    p_max_rows_per_stream int4 default 100, p_attempts_max int4 default 10, p_retry_base_ms int8 default 30000,
    p_retry_cap_ms int8 default 300000, p_hold_destinations text[] default '{}')
returns table (
    source text, lease_lost bool, members int4, partitions int4, completed int4, failed int4, unknown int4,
    message_id uuid, destination text, stream_id uuid, stream_seq int8, version int8, "position" int8,
    "partition" int4, fence int8, attempts int4, status int4, flags int4, type_name text, content_type text,
    payload bytea, metadata bytea, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8, trace_flags int2,
    stored_at timestamptz)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
#variable_conflict use_column
declare
    v_incarnation int4;
    v_completed record;
    v_failed record;
    v_handed record;
begin
    if p_flags & ~127 <> 0 or p_flags is null then
        raise exception 'flags %: the bits known are 1, 2, 4, 8, 16, 32 and 64', p_flags using errcode = '22023';
    end if;
    if p_partition_count <> (select i.partition_count from wh_installation i) then
        raise exception 'this schema was installed with % partitions, the call says %',
            (select i.partition_count from wh_installation i), p_partition_count
            using errcode = '22023', hint = 'The count is fixed at install: give that one, or null.';
    end if;
    if coalesce(cardinality(p_inbox_completions), 0) + coalesce(cardinality(p_inbox_failures), 0)
        + coalesce(cardinality(p_new_inbox_messages), 0) + coalesce(cardinality(p_renew_inbox_lease_ids), 0) > 0
    then
        raise exception 'what is received has a call of its own' using errcode = '0A000',
            hint = 'Leave the parameters of the inbox empty, and call process_inbox_batch in the same transaction.';
    end if;
    perform wh_require('p_max_streams_per_batch', p_max_streams_per_batch, 0, 1000000);
    perform wh_require('p_max_rows', p_max_rows, 1, 10000);
    perform wh_require('p_max_rows_per_stream', p_max_rows_per_stream, 1, 10000);
    perform wh_require('length of ' || a.name, coalesce(a.length, 0), 0, 10000)
    from (values ('p_outbox_completions', cardinality(p_outbox_completions)),
        ('p_outbox_failures', cardinality(p_outbox_failures)),
        ('p_new_outbox_messages', cardinality(p_new_outbox_messages)),
        ('p_renew_outbox_lease_ids', cardinality(p_renew_outbox_lease_ids))) a(name, length);

    v_incarnation := wh_begin_work(p_instance_id, coalesce(p_service_name, ''), p_host_name || ':' || p_process_id,
        p_lease_seconds * 1000::int8, p_max_streams_per_batch > 0);
    source := 'call';
    lease_lost := v_incarnation is null;
    if v_incarnation is not null then
        select c.* into v_completed from wh_complete_work(v_incarnation, p_outbox_completions,
            p_outbox_completion_destinations, p_outbox_completion_statuses) c;
        select f.* into v_failed from wh_fail_work(v_incarnation, p_outbox_failures, p_outbox_failure_destinations,
            p_outbox_failure_reasons, p_outbox_failure_errors, false, p_attempts_max, p_retry_base_ms, p_retry_cap_ms,
            p_hold_destinations) f;
        completed := v_completed.completed;
        failed := v_failed.failed + v_failed.dead;
        unknown := v_completed.unknown + v_failed.unknown;
    end if;

    if coalesce(cardinality(p_new_outbox_messages), 0) > 0 then
        return query
        select 'stored', lease_lost, null::int4, null::int4, null::int4, null::int4, null::int4, s.message_id,
            null::text, null::uuid, s.stream_seq, s.version, s.position, s.partition, null::int8, null::int4,
            case when s.version > 0 then 3 else 1 end, 0, null::text, null::text, null::bytea, null::bytea, null::uuid,
            null::uuid, null::uuid, null::int8, null::int2, null::timestamptz
        from store_outbox_messages(p_new_outbox_messages, p_new_outbox_stream_ids, p_new_outbox_types,
            p_new_outbox_payloads, p_new_outbox_is_event, p_new_outbox_destinations, p_new_outbox_reference_messages,
            p_new_outbox_reference_destinations, p_new_outbox_correlation_ids, p_new_outbox_causation_ids,
            p_new_outbox_trace_ids, p_new_outbox_span_ids, p_new_outbox_trace_flags, p_new_outbox_content_types,
            p_new_outbox_metadata, p_new_outbox_dues) s;
    end if;

    if v_incarnation is not null then
        update wh_handed_out h set handed_at = clock_timestamp()
        where h.incarnation = v_incarnation and h.message_id = any (p_renew_outbox_lease_ids) and not h.decided;
        select h.* into v_handed from wh_hand_out(v_incarnation, p_lease_seconds * 1000::int8, p_max_streams_per_batch,
            p_max_rows, p_max_rows_per_stream) h;
        members := v_handed.members;
        partitions := (select count(*) from wh_partition p where p.owner = v_incarnation);
    end if;
    return next;
    if v_incarnation is not null and (p_max_streams_per_batch > 0 or p_flags & 2 <> 0) then
        return query
        select 'outbox', false, null::int4, null::int4, null::int4, null::int4, null::int4, w.message_id, w.destination,
            w.stream_id, w.stream_seq, w.version, w.position, w.partition, w.fence, w.attempts, w.status,
            w.flags, w.type_name, w.content_type, w.payload, w.metadata,
            w.correlation_id, w.causation_id, w.trace_id, w.span_id, w.trace_flags, w.stored_at
        from wh_work_in_hand(v_incarnation, v_handed.handed_at, p_flags & 2 <> 0) w;
    end if;
end
$$;
