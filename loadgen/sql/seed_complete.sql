-- The seed's completion: published messages are deleted by id.
-- in: $1 uuid[]
delete from @schema@.seed_outbox where message_id = any ($1)
