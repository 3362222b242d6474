-- Operators act on dead letters: a message that was given back knows how often, and a lane can be held behind one.
alter table @schema@.wh_dead_letter add column retried int4 not null default 0;
alter table @schema@.wh_parked_reference add column retried int4 not null default 0;
-- Without a due time of its own: an operator lets it go on.
alter table @schema@.wh_parked add column held bool not null default false;

-- Who inspects (0: nobody has), and when it last did: whoever comes while it does goes away again.
create table @schema@.wh_inspection (
    only_row bool primary key default true check (only_row),
    inspected_at timestamptz not null default '-infinity',
    inspector int4 not null default 0
);
insert into @schema@.wh_inspection default values;
