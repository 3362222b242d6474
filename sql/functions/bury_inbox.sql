-- bury_inbox: kept messages that are given up: they go to the dead letters, with their bodies.
-- in: p_consumer; arrays with an element a message: p_message_ids (kept: keep_inbox, also in this transaction),
--     p_attempts, p_reasons, p_errors (texts, cut to 8 KiB); p_hold: their lanes wait for an operator; otherwise let them
--     go on (unpark_inbox), also those of bodies that were kept in this transaction
-- out: whether it was there, an element an id, in input order; of the same id the first
-- locks: as finish_inbox; then rows of wh_inbox_parked, by ascending lane. The caller holds the lanes' locks
-- cost: a probe, a deletion and a copy of the body a message
create or replace function @schema@.bury_inbox(
    p_consumer int2, p_message_ids uuid[], p_attempts int4[], p_reasons int2[], p_errors text[], p_hold bool default false)
returns bool[]
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_buried uuid[];
begin
    perform from wh_inbox i
    where i.consumer = p_consumer and i.message_id = any (p_message_ids)
    order by i.message_id
    for update;
    with given as (
        select distinct on (g.message_id) g.message_id, g.attempts, g.reason, wh_cut_error(g.error) as error,
            coalesce(octet_length(g.error) > 8192, false) as error_cut
        from unnest(p_message_ids, p_attempts, p_reasons, p_errors) with ordinality
            g(message_id, attempts, reason, error, turn)
        order by g.message_id, g.turn
    ), gone as (
        delete from wh_inbox i using given g
        where i.consumer = p_consumer and i.message_id = g.message_id
        returning i.*, g.attempts, g.reason, g.error, g.error_cut
    ), buried as (
        insert into wh_inbox_dead_letter as d (arrival, span_id, received_at, lane_id, stream_id, message_id,
            correlation_id, causation_id, trace_id, attempts, retried, consumer, trace_flags, reason, error_cut, source,
            error, error_fingerprint, type_name, content_type, metadata, payload)
        select g.arrival, g.span_id, g.received_at, g.lane_id, g.stream_id, g.message_id, g.correlation_id,
            g.causation_id, g.trace_id, g.attempts, g.retried, g.consumer, g.trace_flags, g.reason, g.error_cut, g.source,
            g.error, md5(regexp_replace(left(g.error, 512), '[0-9a-fA-F]{8,}|[0-9]+', '#', 'g')),
            g.type_name, g.content_type, g.metadata, g.payload
        from gone g
        order by g.arrival
        returning d.message_id
    )
    select coalesce(array_agg(b.message_id), '{}') into v_buried from buried b;
    if p_hold then
        insert into wh_inbox_parked as k (due, lane_id, message_id, partition, attempts, consumer, reason, held, error_cut,
            error)
        select distinct on (d.lane_id) 'infinity', d.lane_id, d.message_id,
            compute_partition(d.lane_id, (select i.partition_count from wh_installation i)), d.attempts, p_consumer,
            d.reason, true, d.error_cut, d.error
        from wh_inbox_dead_letter d
        where d.consumer = p_consumer and d.message_id = any (v_buried)
        order by d.lane_id, d.arrival
        on conflict (consumer, lane_id) do update
        set due = 'infinity', held = true, message_id = excluded.message_id, attempts = excluded.attempts,
            reason = excluded.reason, error_cut = excluded.error_cut, error = excluded.error,
            leased_to = null, leased_through = null, leased_rows = null;
    end if;
    return coalesce((
        select array_agg(g.message_id = any (v_buried) and g.nth = 1 order by g.turn)
        from (
            select u.message_id, u.turn, row_number() over (partition by u.message_id order by u.turn) as nth
            from unnest(p_message_ids) with ordinality u(message_id, turn)
        ) g), '{}');
end
$$;
