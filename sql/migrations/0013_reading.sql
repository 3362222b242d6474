-- Reading events: as JSON, for people and programs that ask in SQL; and the feed.

-- Its body comes with the functions: a view names what is there.
create function @schema@.wh_json(p_content_type text, p_bytes bytea) returns jsonb
language sql immutable as 'select null::jsonb';

-- Null where it is not JSON, never an error; the bytes are beside it. Who may read wh_event_store may read it.
create view @schema@.wh_event_json with (security_invoker = true) as
    select e.position, e.stream_id, e.version, e.stream_seq, e.message_id, e.type_name,
        coalesce(e.content_type, 'application/json') as content_type,
        @schema@.wh_json(e.content_type, e.payload) as payload, @schema@.wh_json(null, e.metadata) as metadata,
        e.correlation_id, e.causation_id, e.trace_id, e.partition, e.stored_at, e.payload as payload_bytes,
        e.metadata as metadata_bytes
    from @schema@.wh_event_store e;

-- Where a reader of the feed stands (read_feed), as its text is taken apart: nothing is stored in this form.
create type @schema@.wh_feed_place as (
    started int8,            -- only events behind it are of interest
    read pg_snapshot,        -- transactions read whole
    floor int8,              -- nothing that `read` does not contain lies at or below, but for transactions that it lists
    target pg_snapshot,      -- being read; null: nothing is
    target_floor int8,       -- `floor` when `target` has become `read`
    position int8,           -- of what is in `target`, everything up to here has been read too
    ceiling int8,            -- the last position that `target` can hold; null: not known
    "window" int8,           -- how many positions the next page begins with; null: not known
    quiet bool,              -- the last page was whole
    -- Of events from before a rebase, by the ids they had there: see wh_subscription_partition.
    before_from int8,
    before_read pg_snapshot,
    before_target pg_snapshot,
    before_position int8,
    before_is_foreign bool
);
