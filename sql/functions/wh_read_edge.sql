-- wh_read_edge: a snapshot and the positions that belong to it: a transaction beyond its end has drawn none of its
-- positions at or below `floor`.
-- A snapshot ends with the newest transaction that has completed: one above it may have been running, and drawing, for an
-- hour. So the end is moved up to the next id to be given, and what lies between is listed as running.
-- in: nothing
-- out: edge, floor (-1: not known: this transaction has an id or has asked before, so the next id is not asked for anew;
--     or thousands of them run)
-- locks: none    cost: none to speak of. At READ COMMITTED only
create or replace function @schema@.wh_read_edge(out edge pg_snapshot, out floor int8)
language plpgsql volatile
set search_path = @schema@, pg_temp
as $$
declare
    v_beyond int8;
    v_first bool := pg_current_xact_id_if_assigned() is null
        and coalesce(current_setting('corelane.edge_read', true), '') <> 'yes';
begin
    -- In this order: who gets an id from `age` on gets it, and draws, after `floor` was read. A draw is 4,096 positions.
    floor := coalesce(pg_sequence_last_value('wh_position') + 4095, 0);
    v_beyond := age('3'::xid)::int8 + 3;
    edge := pg_current_snapshot();
    perform set_config('corelane.edge_read', 'yes', true);
    v_beyond := (v_beyond - pg_snapshot_xmax(edge)::text::int8) & 4294967295;
    if v_beyond >= 2147483648 then
        v_beyond := 0; -- Some of them have completed meanwhile.
    end if;
    if not v_first or v_beyond > 5000 then
        floor := -1;
    elsif v_beyond > 0 then
        edge := wh_snapshot_of(pg_snapshot_xmax(edge)::text::int8 + v_beyond,
            array(select x::text::int8 from pg_snapshot_xip(edge) x)
            || array(select generate_series(pg_snapshot_xmax(edge)::text::int8,
                pg_snapshot_xmax(edge)::text::int8 + v_beyond - 1)));
    end if;
end
$$;
