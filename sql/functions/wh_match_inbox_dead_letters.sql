-- wh_match_inbox_dead_letters: the inbox's dead letters that a filter names. Everybody who acts on them uses it.
-- in: p_all: a filter that says so: every one. Otherwise at least one of: p_ids, p_consumer (its name), p_source,
--         p_type (a name, or what it begins with and `*`), p_reason, p_fingerprint (of the error's text), p_stream,
--         p_dead_from, p_dead_before; null is any
--     p_after (only those with a higher id), p_rows_max (1 to 10,000)
-- out: dead_letter_id, ascending
-- errors: 22023 without a filter: nobody acts on all of them by leaving something out
-- locks: none    cost: the dead letters that the filter passes over: by id they are probes, else a walk by id
create or replace function @schema@.wh_match_inbox_dead_letters(
    p_all bool, p_ids int8[], p_consumer text, p_source text, p_type text, p_reason int2, p_fingerprint text,
    p_stream uuid, p_dead_from timestamptz, p_dead_before timestamptz, p_after int8, p_rows_max int4)
returns table (dead_letter_id int8)
language plpgsql stable
set search_path = @schema@, pg_temp
set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
begin
    if not coalesce(p_all, false) and num_nonnulls(p_ids, p_consumer, p_source, p_type, p_reason, p_fingerprint,
        p_stream, p_dead_from, p_dead_before) = 0 then
        raise exception 'a filter of dead letters is empty: name what is meant, or say p_all => true'
            using errcode = '22023';
    end if;
    perform wh_require('p_rows_max', p_rows_max, 1, 10000);
    return query
    select d.dead_letter_id
    from wh_inbox_dead_letter d
    where d.dead_letter_id > coalesce(p_after, 0)
        and (p_ids is null or d.dead_letter_id = any (p_ids))
        and (p_consumer is null or d.consumer = (select c.consumer from wh_consumer c where c.name = p_consumer))
        and (p_source is null or d.source = p_source)
        and (p_type is null or case
            when right(p_type, 1) = '*' then starts_with(d.type_name, left(p_type, -1)) else d.type_name = p_type end)
        and (p_reason is null or d.reason = p_reason)
        and (p_fingerprint is null or d.error_fingerprint = p_fingerprint)
        and (p_stream is null or d.stream_id = p_stream)
        and (p_dead_from is null or d.dead_at >= p_dead_from)
        and (p_dead_before is null or d.dead_at < p_dead_before)
    order by d.dead_letter_id
    limit p_rows_max;
end
$$;
