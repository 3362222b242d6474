-- erase_events: overwrites what streams say of a subject, wherever it stands in this schema. Payload and metadata go, and
-- the content type becomes `application/vnd.corelane.erased`; the rows stay, with their ids, numbers and types: versions
-- have no gap, and every reader, replay and receiver sees the mark.
--
--     -- Two streams whole, and the events 3 and 4 of a third; then again while `more`, and at last to see that it counts 0.
--     select * from corelane.erase_events('{018f…aa,018f…bb,018f…cc,018f…cc}', '{null,null,3,4}', p_dry_run => false);
--
-- in: p_stream_ids (1 to 1,000 elements); p_versions: one each: an event, or null for everything of the stream, other
--     messages included (null: for all); p_rows_max: at most so many rows a table at once (1 to 10,000): call it until
--     `more` is false, each call a transaction of its own; p_dry_run: only count, then all of them
-- out: rows erased (or to be erased), those that bear the mark already not counted: events; messages (in the outbox's
--     segments, scheduled, or beside the log); dead_letters; inbox (kept or dead); more
-- not reached: what a program has in memory (a message under way may be published as it was, once), what was published
--     or read before, WAL, backups, standbys and pages of the files until they are written anew (VACUUM FULL); stream id,
--     type, ids and the transport's words about a failure, which are not overwritten
-- errors: 22023 for arrays that do not fit; as wh_lock_owners; 40P01, if another operator acts on the same dead letters
-- runs as the tables' owner; EXECUTE is an operator's (see `corelane migrate --grant-operator-to`)
-- locks: the streams' dead letters, fences of the owners (exclusive, see wh_lock_owners), partitions without owner, the rows
-- cost: a probe and a new version of the row an event; reads whatever is parked, dead or scheduled, and the inbox. A
--     stream's events that are erased are read again by each further call
create or replace function @schema@.erase_events(
    p_stream_ids uuid[], p_versions int8[] default null, p_rows_max int4 default 1000, p_dry_run bool default true,
    out events int8, out messages int8, out dead_letters int8, out inbox int8, out more bool)
language plpgsql volatile security definer
set search_path = @schema@, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_whole uuid[];
    v_streams uuid[];
    v_versions int8[];
    v_partitions int4[];
    v_table record;
    v_statement text;
    v_count int8;
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    perform wh_require('elements of p_stream_ids', cardinality(p_stream_ids), 1, 1000);
    perform wh_require('elements of p_versions', coalesce(cardinality(p_versions), cardinality(p_stream_ids)),
        cardinality(p_stream_ids), cardinality(p_stream_ids));
    if array_position(p_stream_ids, null) is not null then
        raise exception 'an element of p_stream_ids is null' using errcode = '22023';
    end if;
    select coalesce(array_agg(distinct s.id) filter (where s.version is null), '{}'),
        coalesce(array_agg(s.id order by s.id, s.version) filter (where s.version is not null), '{}'),
        coalesce(array_agg(s.version order by s.id, s.version) filter (where s.version is not null), '{}'),
        array_agg(distinct compute_partition(s.id, i.partition_count))
    into v_whole, v_streams, v_versions, v_partitions
    from (select distinct u.id, u.version from unnest(p_stream_ids, p_versions) u(id, version)) s
    cross join wh_installation i;

    if not p_dry_run then
        -- Nobody copies a body from here to there meanwhile: in the order of other operators.
        perform from wh_dead_letter d where d.lane_id = any (p_stream_ids) or d.stream_id = any (p_stream_ids)
        order by d.dead_letter_id for update;
        perform from wh_inbox_dead_letter d where d.stream_id = any (p_stream_ids) order by d.dead_letter_id for update;
        perform wh_lock_owners(v_partitions);
        perform from wh_partition p where p.partition = any (v_partitions) and p.owner is null
        order by p.partition for update;
    end if;

    events := 0;
    messages := 0;
    dead_letters := 0;
    inbox := 0;
    more := false;
    -- Later statements than the locks, in the way that bodies go.
    for v_table in
        select * from (values
            (1, 'wh_scheduled', 't.stream_id', false, 'true'),
            (2, 'wh_event_store', 't.stream_id', true, 'true'),
            (3, 'wh_outbox', 't.lane_id', false, 't.stream_id is not null'),
            (4, 'wh_parked_reference', 'coalesce(t.stream_id, t.lane_id)', true, 't.payload is not null'),
            (5, 'wh_dead_letter', 'coalesce(t.stream_id, t.lane_id)', true, 'true'),
            (6, 'wh_inbox', 't.stream_id', false, 'true'),
            (7, 'wh_inbox_dead_letter', 't.stream_id', false, 'true')) t(turn, name, stream, has_versions, fits)
        order by turn
    loop
        v_statement := format('select t.tableoid as part, t.ctid as place from %1$s t where %2$s = any ($1) and %3$s'
            ' and (t.content_type is distinct from $4 or octet_length(t.payload) > 0 or t.metadata is not null)', v_table.name, v_table.stream, v_table.fits);
        if v_table.has_versions then
            v_statement := v_statement || format(' union all select t.tableoid, t.ctid from unnest($2, $3) s(id, version)'
                ' join %1$s t on %2$s = s.id and t.version = s.version where %3$s'
                ' and (t.content_type is distinct from $4 or octet_length(t.payload) > 0 or t.metadata is not null)'
                ' and not s.id = any ($1)',
                v_table.name, v_table.stream, v_table.fits);
        end if;
        if p_dry_run then
            v_statement := format('select count(*) from (%s) p', v_statement);
        else
            v_statement := format('with page as materialized (select * from (%2$s) p limit $5), erased as ('
                'update %1$s t set content_type = $4, metadata = null, payload = case when t.payload is not null then $6 end'
                ' from page p where t.tableoid = p.part and t.ctid = p.place returning 1) select count(*) from erased',
                v_table.name, v_statement);
        end if;
        execute v_statement into v_count using v_whole, v_streams, v_versions, 'application/vnd.corelane.erased'::text,
            p_rows_max, ''::bytea;
        case
            when v_table.turn = 2 then events := v_count;
            when v_table.turn = 5 then dead_letters := v_count;
            when v_table.turn > 5 then inbox := inbox + v_count;
            else messages := messages + v_count;
        end case;
        more := more or not p_dry_run and v_count >= p_rows_max;
    end loop;
end
$$;
revoke execute on function @schema@.erase_events(uuid[], int8[], int4, bool) from public;
