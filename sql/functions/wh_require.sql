-- wh_require: refuses a parameter that is out of its range.
-- in: p_name, p_value, p_least, p_most    out: nothing
-- errors: 22023, which names all of them; for null as well
-- locks: none    cost: none
create or replace function @schema@.wh_require(p_name text, p_value int8, p_least int8, p_most int8) returns void
language plpgsql immutable
as $$
begin
    if p_value is null or p_value not between p_least and p_most then
        raise exception '% = %: must be % to %', p_name, coalesce(p_value::text, 'null'), p_least, p_most
            using errcode = '22023';
    end if;
end
$$;
