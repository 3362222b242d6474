-- wh_open_place: a place in the feed as it is to be read from here: in another life of the server its last proved one, after a
-- rebase what lies before it by the old transaction ids and everything else anew.
-- in: p_place (see begin_feed)
-- out: the place, of this life and generation
-- errors: CL022, CL023: see read_feed
-- locks: none    cost: none to speak of
create or replace function @schema@.wh_open_place(p_place text) returns jsonb
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_place jsonb;
    v_at wh_feed_place;
    v_epoch uuid;
    v_installation wh_installation;
    v_generation int4;
    v_rebased int8;
    v_is_same_life bool;
    v_is_done bool;
begin
    select i.* into strict v_installation from wh_installation i;
    select e.token into v_epoch from wh_epoch e;
    if v_epoch is null then
        v_epoch := wh_epoch_token();
    end if;
    begin
        v_place := p_place::jsonb;
        if v_place ->> 'feed' is distinct from '1' then
            raise exception 'its form is %', coalesce(v_place ->> 'feed', 'not said') using errcode = '22023';
        end if;
        v_generation := (v_place ->> 'generation')::int4;
        v_rebased := (v_place ->> 'rebased')::int8;
        v_is_same_life := v_generation = v_installation.generation and (v_place ->> 'epoch')::uuid = v_epoch;
        if v_is_same_life then
            v_at := jsonb_populate_record(null::wh_feed_place, v_place -> 'at');
        else
            v_at := jsonb_populate_record(null::wh_feed_place, v_place -> 'proved');
            v_at.ceiling := null;
            v_at.quiet := false;
        end if;
        if num_nulls(v_is_same_life, v_generation, v_rebased, (v_place ->> 'server')::int8, (v_place ->> 'proved_at')::numeric, v_at.started,
            v_at.read, v_at.floor, v_at.target_floor, v_at.position, v_at.quiet, v_at.before_from, v_at.before_read,
            v_at.before_position, v_at.before_is_foreign) > 0
        then
            raise exception 'parts of it are missing' using errcode = '22023';
        end if;
        if coalesce(v_at."window", 1) < 1 or v_at.position < 0 then
            raise exception 'a window of %, a position of %', v_at."window", v_at.position using errcode = '22023';
        end if;
    exception
        when data_exception or program_limit_exceeded then
            raise exception 'this is no place in a feed: %', sqlerrm
                using errcode = 'CL022', hint = 'Keep the text as it was answered, or begin behind a position (begin_feed).';
    end;
    if v_generation > v_installation.generation
        or v_generation = v_installation.generation and not v_is_same_life
        and greatest(pg_snapshot_xmax(v_at.read), pg_snapshot_xmax(v_at.target)) > pg_snapshot_xmax(pg_current_snapshot())
    then
        raise exception 'the place lies ahead of this server, which has lost transactions (a restore to an earlier time, '
            'a failover): events under ids given again would be skipped'
            using errcode = 'CL023', hint = 'Begin behind a position that was read (begin_feed).';
    end if;
    if v_generation < v_installation.generation then
        -- As `rebase` does it for subscriptions.
        v_is_done := v_at.before_from >= v_rebased;
        v_at.before_from := case when v_is_done then v_rebased
            else greatest(v_at.before_from, case when v_at.target is null then 0 else least(v_at.position, v_rebased) end) end;
        v_is_done := v_is_done and v_generation + 1 = v_installation.generation;
        v_at.before_read := case when v_is_done then v_at.read else '1:1:' end;
        v_at.before_target := case when v_is_done then v_at.target end;
        v_at.before_position := case when v_is_done and v_at.target is not null then v_at.position else 0 end;
        v_at.before_is_foreign := (v_place ->> 'server')::int8 <> v_installation.system_identifier;
        v_at.floor := v_installation.rebased_position;
        v_at.read := '1:1:';
        v_at.target := null;
        v_at.target_floor := 0;
        v_at.position := 0;
        v_place := v_place || jsonb_build_object(
            'server', v_installation.system_identifier, 'generation', v_installation.generation,
            'rebased', v_installation.rebased_position);
    end if;
    if v_is_same_life then
        return v_place;
    end if;
    return v_place || jsonb_build_object('epoch', v_epoch, 'at', v_at, 'proved', v_at);
end
$$;
