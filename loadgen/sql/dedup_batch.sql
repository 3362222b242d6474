-- The same for a batch.
insert into @schema@.dedup_seen (message_id, consumer, received_at)
select id, 1, now() from unnest($1::uuid[]) id on conflict do nothing returning message_id
