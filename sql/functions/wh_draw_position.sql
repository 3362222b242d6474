-- wh_draw_position: the transaction's id, then a position for up to 4,096 messages.
-- The order is what a claim relies on: a transaction that begins to have an id after a snapshot was taken draws its
-- positions after it as well, so that a reader need not look below the sequence's value at its last snapshot. Draw
-- positions nowhere before the transaction has its id, and only after the stream's lock.
-- out: xid int8, position int8
create or replace function @schema@.wh_draw_position(out xid int8, out "position" int8)
language plpgsql volatile
as $$
begin
    xid := pg_current_xact_id()::text::int8;
    "position" := nextval('@schema@.wh_position');
end
$$;
