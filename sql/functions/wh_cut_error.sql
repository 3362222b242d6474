-- wh_cut_error: an error's text as it is kept: at most 8 KiB, cut on a character's border.
-- in: p_error text (null: none)    out: text    locks: none    cost: the text's length
create or replace function @schema@.wh_cut_error(p_error text) returns text
language sql immutable parallel safe
as $$
    select case
        when p_error is null then ''
        when octet_length(convert_to(p_error, 'UTF8')) <= 8192 then p_error
        else (
            -- The byte behind the cut is not the continuation of a character.
            select convert_from(substring(e.bytes from 1 for k.size), 'UTF8')
            from (select convert_to(p_error, 'UTF8') as bytes) e, generate_series(8189, 8192) k(size)
            where get_byte(e.bytes, k.size) & 192 <> 128
            order by k.size desc limit 1)
    end
$$;
