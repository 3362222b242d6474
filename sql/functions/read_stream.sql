-- read_stream: a page of a stream's events, forwards or backwards from a version.
--
--     -- the events 501 to 1,000, and then the newest one
--     select version, type_name, convert_from(payload, 'UTF8') from corelane.read_stream('018f…aa', 501, false, 500);
--     select version from corelane.read_stream('018f…aa', 9223372036854775807, true, 1);
--
-- in: p_stream_id; p_from: the first version that is wanted (backwards: the highest); p_backwards; p_rows_max: at most so
--     many; p_bytes_max: at most about so many bytes of payload and metadata, but always one event
-- out: the events by version, ascending or descending; payload and metadata are the bytes that were stored, content_type
--     null says application/json. Fewer than p_rows_max is the end only if p_bytes_max was not reached: ask once more.
--     Backwards, the page that reaches the first event that is kept ends there
-- errors: CL030 from below the first event that is kept (see truncate_stream): it says which that is (`detail`:
--     `stream_id=… first_version=…`; `hint`: the note that was left)
-- locks: none    cost: one walk in the primary key from p_from on, whatever the stream's length; a probe
create or replace function @schema@.read_stream(
    p_stream_id uuid, p_from int8 default 1, p_backwards bool default false, p_rows_max int4 default 500,
    p_bytes_max int8 default 4194304)
returns table (version int8, stream_seq int8, "position" int8, stored_at timestamptz, message_id uuid, type_name text,
    content_type text, correlation_id uuid, causation_id uuid, trace_id uuid, span_id int8, trace_flags int2,
    metadata bytea, payload bytea)
language plpgsql stable
set search_path = @schema@, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_tombstone record;
begin
    -- Nothing is silently fewer. In the same snapshot as what is read.
    select t.first_version, t.note into v_tombstone
    from wh_tombstone t where t.stream_id = p_stream_id and t.first_version > p_from;
    if found then
        raise exception 'stream % begins at version %: what was before is truncated', p_stream_id,
            v_tombstone.first_version using errcode = 'CL030',
            detail = format('stream_id=%s first_version=%s', p_stream_id, v_tombstone.first_version),
            hint = coalesce(nullif(v_tombstone.note, ''), 'Read from that version on.');
    end if;
    if p_backwards then
        return query
        select p.version, p.stream_seq, p.position, p.stored_at, p.message_id, p.type_name, p.content_type,
            p.correlation_id, p.causation_id, p.trace_id, p.span_id, p.trace_flags, p.metadata, p.payload
        from (
            select e.*, sum(octet_length(e.payload) + coalesce(octet_length(e.metadata), 0)) over (order by e.version desc
                rows between unbounded preceding and 1 preceding) as before
            from (
                select * from wh_event_store e where e.stream_id = p_stream_id and e.version <= p_from
                order by e.version desc limit p_rows_max
            ) e
        ) p
        where coalesce(p.before, 0) < p_bytes_max
        order by p.version desc;
    else
        return query
        select p.version, p.stream_seq, p.position, p.stored_at, p.message_id, p.type_name, p.content_type,
            p.correlation_id, p.causation_id, p.trace_id, p.span_id, p.trace_flags, p.metadata, p.payload
        from (
            select e.*, sum(octet_length(e.payload) + coalesce(octet_length(e.metadata), 0)) over (order by e.version
                rows between unbounded preceding and 1 preceding) as before
            from (
                select * from wh_event_store e where e.stream_id = p_stream_id and e.version >= p_from
                order by e.version limit p_rows_max
            ) e
        ) p
        where coalesce(p.before, 0) < p_bytes_max
        order by p.version;
    end if;
end
$$;
