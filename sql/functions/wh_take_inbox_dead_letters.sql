-- wh_take_inbox_dead_letters: the inbox's dead letters that a filter names, in the hands of an operator who changes them.
-- in: the filter (see wh_match_inbox_dead_letters); p_rows_max (1 to 4,096); p_dry_run: only look, lock nothing
-- out: ids, ascending: some may have gone until they were locked: read what they are like in a later statement; more
--     (further ones match, beyond p_rows_max)
-- errors: as wh_match_inbox_dead_letters
-- locks: the dead letters (for update, by id)
-- cost: as wh_match_inbox_dead_letters, and a lock a dead letter
create or replace function @schema@.wh_take_inbox_dead_letters(
    p_all bool, p_ids int8[], p_consumer text, p_source text, p_type text, p_reason int2, p_fingerprint text,
    p_stream uuid, p_dead_from timestamptz, p_dead_before timestamptz, p_after int8, p_rows_max int4, p_dry_run bool,
    out ids int8[], out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 4096);
    ids := array(select m.dead_letter_id from wh_match_inbox_dead_letters(p_all, p_ids, p_consumer, p_source, p_type,
        p_reason, p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max + 1) m);
    more := cardinality(ids) > p_rows_max;
    ids := ids[1 : p_rows_max];
    if not p_dry_run then
        perform from wh_inbox_dead_letter d where d.dead_letter_id = any (ids) order by d.dead_letter_id for update;
    end if;
end
$$;
