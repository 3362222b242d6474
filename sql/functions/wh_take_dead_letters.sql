-- wh_take_dead_letters: the dead letters that a filter names, in the hands of an operator who changes them: nobody else
-- does, and their owners write nothing until the transaction ends.
-- in: the filter (see wh_match_dead_letters); p_rows_max (1 to 4,096); p_dry_run: only look, lock nothing
-- out: ids, ascending: some may have gone until they were locked: read what they are like in a later statement, which
--     finds whatever their owners have written; more (further ones match, beyond p_rows_max)
-- errors: as wh_match_dead_letters and wh_lock_owners
-- locks: the dead letters (for update, by id), then fences of the owners (exclusive, see wh_lock_owners). An owner waits for
--     a dead letter only when it is deleted, which is done under its fence
-- cost: as wh_match_dead_letters, and a lock a dead letter and owner
create or replace function @schema@.wh_take_dead_letters(
    p_all bool, p_ids int8[], p_destination text, p_type text, p_reason int2, p_fingerprint text, p_stream uuid,
    p_dead_from timestamptz, p_dead_before timestamptz, p_after int8, p_rows_max int4, p_dry_run bool,
    out ids int8[], out more bool)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
begin
    perform wh_require('p_rows_max', p_rows_max, 1, 4096);
    ids := array(select m.dead_letter_id from wh_match_dead_letters(p_all, p_ids, p_destination, p_type, p_reason,
        p_fingerprint, p_stream, p_dead_from, p_dead_before, p_after, p_rows_max + 1) m);
    more := cardinality(ids) > p_rows_max;
    ids := ids[1 : p_rows_max];
    if not p_dry_run then
        perform from wh_dead_letter d where d.dead_letter_id = any (ids) order by d.dead_letter_id for update;
        perform wh_lock_owners(array(
            select distinct d.partition from wh_dead_letter d where d.dead_letter_id = any (ids)));
    end if;
end
$$;
