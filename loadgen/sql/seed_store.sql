-- store_outbox_messages of the seed, set-based: the outbox rows and the event store copy, versions by MAX + 1.
-- in: $1 jsonb array of {message_id, stream_id, destination, message_type, event_data, metadata, is_event}, $2 partition count
-- locks: none; two writers of one stream would collide on (stream_id, version), so the callers have streams of their own
with incoming as materialized (
    select incoming.*
    from rows from (jsonb_to_recordset($1) as (
        message_id uuid, stream_id uuid, destination text, message_type text, event_data jsonb, metadata jsonb, is_event bool
    )) with ordinality as incoming (message_id, stream_id, destination, message_type, event_data, metadata, is_event, place)
),
last_version as materialized (
    select stream_id,
        coalesce((select max(version) from @schema@.seed_event_store stored where stored.stream_id = streams.stream_id), 0) as version
    from (select distinct stream_id from incoming where is_event and stream_id is not null) as streams
),
queued as (
    insert into @schema@.seed_outbox (message_id, stream_id, destination, message_type, event_data, metadata, partition_number, is_event)
    select message_id, stream_id, destination, message_type, event_data, metadata,
        (hashtext(stream_id::text) & 2147483647) % $2, is_event
    from incoming
    order by place
)
insert into @schema@.seed_event_store (event_id, stream_id, event_type, event_data, metadata, version)
select message_id, incoming.stream_id, message_type, event_data -> 'Payload', metadata,
    last_version.version + row_number() over (partition by incoming.stream_id order by place)
from incoming
join last_version on last_version.stream_id = incoming.stream_id
where is_event
