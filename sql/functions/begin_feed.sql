-- begin_feed: a place in the feed of all events, for read_feed.
-- in: p_from: 0: before the first event, a position: behind it, null: before what is not committed yet
-- out: the place, a text to be kept as it is
-- errors: 22023 for a negative position; 25006 on a standby, 25001 unless READ COMMITTED; from now on: CL021 in a
--     transaction that has written before
-- locks: none    cost: none to speak of; from now on: a message in the WAL
create or replace function @schema@.begin_feed(p_from int8 default 0) returns text
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_edge pg_snapshot := '1:1:';
    v_floor int8;
    v_epoch uuid;
    v_installation wh_installation;
    v_at jsonb;
begin
    if p_from < 0 then
        raise exception 'a position is 0 (the beginning) or more, not %', p_from using errcode = '22023';
    end if;
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: the feed needs the primary' using errcode = '25006';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'the feed is read at READ COMMITTED' using errcode = '25001';
    end if;
    select i.* into strict v_installation from wh_installation i;
    if p_from is null then
        -- Before this transaction has an id.
        select e.edge, greatest(e.floor, 0) into v_edge, v_floor from wh_read_edge() e;
    end if;
    v_epoch := wh_epoch_token();
    v_at := jsonb_build_object(
        'started', coalesce(p_from, 0), 'read', v_edge,
        'floor', coalesce(v_floor, greatest(p_from, v_installation.rebased_position)), 'target', null,
        'target_floor', 0, 'position', 0, 'ceiling', null, 'window', null, 'quiet', false,
        'before_from', coalesce(p_from, v_installation.rebased_position), 'before_read', '1:1:', 'before_target', null,
        'before_position', 0, 'before_is_foreign', false);
    if p_from is null and not wh_prove_place(pg_snapshot_xmax(v_edge)) then
        raise exception 'the transaction has written before: begin a feed in one of its own' using errcode = 'CL021';
    end if;
    return jsonb_build_object(
        'feed', 1, 'server', v_installation.system_identifier, 'generation', v_installation.generation,
        'rebased', v_installation.rebased_position, 'epoch', v_epoch, 'proved_at', extract(epoch from clock_timestamp()),
        'at', v_at, 'proved', v_at);
end
$$;
