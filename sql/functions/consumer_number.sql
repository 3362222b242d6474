-- consumer_number: the number of a consumer, which is made on first use.
-- in: p_name: 1 to 255 bytes    out: int2
-- errors: 22023 for such a name, and for the 1,001st consumer
-- days: it also makes the parts of wh_inbox_seen for today and the days ahead, where they are missing: whoever receives
--     asks for its number first, and an id of today that comes before the day has a part stays in the default part
-- locks: as wh_make_inbox_days    cost: two probes
create or replace function @schema@.consumer_number(p_name text) returns int2
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_consumer int2;
begin
    if coalesce(octet_length(p_name), 0) not between 1 and 255 then
        raise exception 'a consumer''s name has 1 to 255 bytes, this one has %', coalesce(octet_length(p_name), 0)
            using errcode = '22023';
    end if;
    perform wh_make_inbox_days(3);
    select c.consumer into v_consumer from wh_consumer c where c.name = p_name;
    if v_consumer is null then
        if (select count(*) from wh_consumer) >= 1000 then
            raise exception 'there are 1000 consumers already' using errcode = '22023',
                hint = 'A consumer is a part of a service, not one of its instances.';
        end if;
        insert into wh_consumer (name) values (p_name) on conflict (name) do nothing;
        -- A later statement: of another transaction that was first.
        select c.consumer into strict v_consumer from wh_consumer c where c.name = p_name;
    end if;
    return v_consumer;
end
$$;
