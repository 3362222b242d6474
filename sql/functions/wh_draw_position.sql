-- wh_draw_position: a floor, the transaction's id, a position for up to 4,096 messages, in this order.
-- A claim relies on the order: whoever gets a higher transaction id than this one gets it after `floor` was the
-- sequence's value, and draws its positions later still. A claim that has read this row need never again look below
-- its floor. So no position is drawn before the transaction has its id, and none before the streams' locks.
-- A transaction that had its id before the call knows no floor (0).
-- in: nothing
-- out: floor int8, xid int8, position int8 (the first; message i has position + i - 1)
-- locks: none; the caller holds the streams'    cost: a transaction id, and a step of a sequence
create or replace function @schema@.wh_draw_position(out floor int8, out xid int8, out "position" int8)
language plpgsql volatile
as $$
begin
    floor := 0;
    if pg_current_xact_id_if_assigned() is null then
        floor := coalesce(pg_sequence_last_value('@schema@.wh_position'), 0);
    end if;
    xid := pg_current_xact_id()::text::int8;
    "position" := nextval('@schema@.wh_position');
end
$$;
