-- wh_match_events: the events that a filter names, by position; a bounded part of the event store a call.
-- in: see replay_events; p_after: only behind this position; p_rows_max
-- out: stream_ids, versions: one element an event, by position; last_position: looked at so far; more: there may be
--     further ones behind it
-- errors: 22023 without a filter, with versions but no streams, or with over 1,000 streams
-- locks: none
-- cost: with streams a probe a stream and the rows behind p_after; else at most some 100,000 events by position
create or replace function @schema@.wh_match_events(
    p_all bool, p_streams uuid[], p_version_from int8, p_version_to int8, p_position_from int8, p_position_to int8,
    p_type text, p_stored_from timestamptz, p_stored_before timestamptz, p_after int8, p_rows_max int4,
    out stream_ids uuid[], out versions int8[], out last_position int8, out more bool)
language plpgsql stable
set search_path = @schema@, pg_temp
set jit = off
set enable_seqscan = off
set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_from int8 := greatest(coalesce(p_after, 0), coalesce(p_position_from, 1) - 1);
    v_end constant int8 := least(coalesce(p_position_to, 9223372036854775807),
        coalesce(pg_sequence_last_value('wh_position'::regclass), 0) + 4095);
    v_width int8 := 4096 * 1024;
    v_to int8;
    v_room int4 := 100000;
    v_low int8 := coalesce(p_version_from, 1);
    v_high int8;
    v_middle record;
    v_part record;
    v_positions int8[];
begin
    if not coalesce(p_all, false) and num_nonnulls(p_streams, p_position_from, p_position_to, p_type, p_stored_from,
        p_stored_before) = 0 then
        raise exception 'a filter of events is empty: name what is meant, or say p_all => true' using errcode = '22023';
    end if;
    if num_nonnulls(p_version_from, p_version_to) > 0 and p_streams is null or cardinality(p_streams) > 1000 then
        raise exception 'versions are those of streams that are named, at most 1000 of them' using errcode = '22023';
    end if;
    stream_ids := '{}';
    versions := '{}';
    last_position := v_from;
    more := false;

    if p_streams is not null then
        -- Of one long stream, pages begin where the one before ended: positions ascend along it.
        if cardinality(p_streams) = 1 and v_from > 0 then
            select max(e.version) + 1 into v_high from wh_event_store e where e.stream_id = p_streams[1];
            while v_low < v_high loop
                select e.version, e.position into v_middle
                from wh_event_store e
                where e.stream_id = p_streams[1] and e.version >= v_low + (v_high - v_low) / 2
                order by e.version limit 1;
                if v_middle.position <= v_from then
                    v_low := v_middle.version + 1;
                else
                    v_high := v_low + (v_high - v_low) / 2;
                end if;
            end loop;
        end if;
        select array_agg(e.stream_id order by e.position), array_agg(e.version order by e.position),
            array_agg(e.position order by e.position)
        into stream_ids, versions, v_positions
        from (
            select e.stream_id, e.version, e.position
            from (select distinct s.id from unnest(p_streams) s(id)) s
            cross join lateral (
                select e.stream_id, e.version, e.position
                from wh_event_store e
                where e.stream_id = s.id and e.version >= v_low
                    and e.version <= coalesce(p_version_to, 9223372036854775807)
                    and e.position > v_from and e.position <= v_end
                    and (p_type is null or case when right(p_type, 1) = '*' then starts_with(e.type_name, left(p_type, -1))
                        else e.type_name = p_type end)
                    and (p_stored_from is null or e.stored_at >= p_stored_from)
                    and (p_stored_before is null or e.stored_at < p_stored_before)
                order by e.version
                limit p_rows_max + 1
            ) e
            order by e.position
            limit p_rows_max + 1
        ) e;
        stream_ids := coalesce(stream_ids, '{}');
        versions := coalesce(versions, '{}');
        more := cardinality(versions) > p_rows_max;
        stream_ids := stream_ids[1 : p_rows_max];
        versions := versions[1 : p_rows_max];
        last_position := case when more then v_positions[p_rows_max] else greatest(v_from, v_end) end;
        return;
    end if;

    -- By position there is no index that gives an order: windows of it, ever wider while little is found in them.
    while v_from < v_end loop
        v_to := v_from + least(v_width, v_end - v_from);
        select count(*) as looked, max(l.position) as last,
            coalesce(array_agg(l.stream_id order by l.position) filter (where l.fits), '{}') as stream_ids,
            coalesce(array_agg(l.version order by l.position) filter (where l.fits), '{}') as versions,
            coalesce(array_agg(l.position order by l.position) filter (where l.fits), '{}') as positions
        into v_part
        from (
            select e.position, e.stream_id, e.version,
                (p_type is null or case when right(p_type, 1) = '*' then starts_with(e.type_name, left(p_type, -1))
                    else e.type_name = p_type end)
                and (p_stored_from is null or e.stored_at >= p_stored_from)
                and (p_stored_before is null or e.stored_at < p_stored_before) as fits
            from wh_event_store e
            where e.position > v_from and e.position <= v_to
            order by e.position
            limit v_room + 1
        ) l;
        v_from := case when v_part.looked > v_room then v_part.last else v_to end;
        if cardinality(versions) + cardinality(v_part.versions) > p_rows_max then
            more := true;
            v_from := v_part.positions[p_rows_max - cardinality(versions)];
        end if;
        stream_ids := (stream_ids || v_part.stream_ids)[1 : p_rows_max];
        versions := (versions || v_part.versions)[1 : p_rows_max];
        v_room := v_room - v_part.looked;
        exit when more or v_room <= 0;
        v_width := v_width * 4;
    end loop;
    last_position := v_from;
    more := more or v_from < v_end;
end
$$;
