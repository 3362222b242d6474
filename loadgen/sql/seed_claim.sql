-- The seed's claim: row leases, in order of storing, of this claimer's partitions.
-- in: $1 instance, $2 lease in seconds, $3 rows at most, $4 claimers, $5 index of this one
-- locks: the rows it takes; rows locked by others are passed over
with picked as materialized (
    select message_id
    from @schema@.seed_outbox
    where status & 32772 = 0
        and (instance_id is null or lease_expiry < now())
        and partition_number % $4 = $5
    order by place
    limit $3
    for update skip locked
)
update @schema@.seed_outbox claimed
set instance_id = $1, lease_expiry = now() + make_interval(secs => $2)
from picked
where claimed.message_id = picked.message_id
returning claimed.message_id, claimed.stream_id, claimed.place, claimed.destination, claimed.message_type,
    claimed.event_data, claimed.metadata
