-- wh_epoch_token: the token of this life of the server, made by whoever finds the table emptied by a crash.
-- in: nothing    out: token uuid
-- locks: none but the row's own: of two makers the second waits for the first and reads its token
-- cost: one row of one page
create or replace function @schema@.wh_epoch_token() returns uuid
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_token uuid;
begin
    select e.token into v_token from wh_epoch e;
    if v_token is null then
        insert into wh_epoch default values on conflict (only_row) do nothing;
        -- A later statement: sees the row of the maker that was waited for.
        select e.token into strict v_token from wh_epoch e;
    end if;
    return v_token;
end
$$;
