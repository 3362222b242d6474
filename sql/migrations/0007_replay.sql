-- Operators publish events once more.
--
-- How far each replay has come: a call that is repeated because its answer was lost goes on behind what it has done.
-- Rows of finished replays are told from others by nothing: they go a month after their last call.
create table @schema@.wh_replay (
    replayed_to int8 not null default 0, -- position in wh_event_store
    events int8 not null default 0,
    started_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    replay_id uuid primary key,
    destination text not null,
    filter jsonb not null
);

-- It gets a further column in its answer: what an older program calls is still there.
drop function if exists @schema@.claim_parked(uuid, text, int4);
