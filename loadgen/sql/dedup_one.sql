-- Remember an id, as most inboxes do it: one statement and one commit a message.
insert into @schema@.dedup_seen (message_id, consumer, received_at) values ($1, 1, now()) on conflict do nothing
