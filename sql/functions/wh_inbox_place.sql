-- wh_inbox_place: where ids of a day (wh_inbox_day) are remembered that arrive today.
-- in: day, today (both counted from 1970), has_part: whether the day has a part
-- out: 0 with their day; 2 among the misdated, apart from all days; 1 both
-- why both: two transactions may take the same id to stand on different sides of a border, since the day ends between
--     them. One that takes it for neither side writes both places, and so meets whoever writes one of them. The borders
--     are a day wide; a part that is there does not go while somebody remembers ids (remember_inbox)
-- locks: none    cost: one expression, inlined
create or replace function @schema@.wh_inbox_place(day int4, today int4, has_part bool) returns int4
language sql immutable parallel safe
as $$
    select case
        when day < 0 then 0
        when day > today + 2 then 2
        when day = today + 2 then 1
        when has_part or day >= today - 1 then 0
        when day = today - 2 then 1
        else 2
    end
$$;
