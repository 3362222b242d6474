-- The versions of streams, after a conflict.
select s.id, coalesce((select e.version from @schema@.append_event e where e.stream_id = s.id order by e.version desc limit 1), 0)
from unnest($1::uuid[]) s(id)
