-- The inbox: ids whose own time is far from the time of their arrival.
--
-- Invariants
-- - They stand in a part of their own, whatever day they name (remember_inbox says which): no day waits for them, and the
--   default part has next to nothing that the making of a day would have to read.
-- - Rows of this part and of the default one are deleted, each when its own window is over: they have no day to go with.
create table @schema@.wh_inbox_seen_misdated partition of @schema@.wh_inbox_seen for values in (-2);
create index wh_inbox_seen_misdated_age on @schema@.wh_inbox_seen_misdated (received_at);
create index wh_inbox_seen_other_age on @schema@.wh_inbox_seen_other (received_at);

-- What stood in the way of a day. A later statement than the lock on the default part.
with gone as (
    delete from @schema@.wh_inbox_seen_other returning received_at, message_id, consumer
)
insert into @schema@.wh_inbox_seen_misdated (received_at, message_id, day, consumer)
select g.received_at, g.message_id, -2, g.consumer from gone g;
delete from @schema@.wh_inbox_part where not is_made;
