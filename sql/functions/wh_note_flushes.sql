-- wh_note_flushes: goes on noting the newest flush of each living shard in a segment's log, for a shard that asks for
-- it when its log row is truncated (find_flush).
-- in: p_segment (it has a row in wh_rotation, made in an earlier statement)    out: whether all are noted
-- late rows: what is written after this sends the segment back to its checks (wh_truncate_segment), and here again
-- locks: none on the log    cost: at most 20,000 log rows a call
create or replace function @schema@.wh_note_flushes(p_segment int2) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
declare
    v_to int8;
    v_count int4;
begin
    with page as (
        select l.position, l.xid, l.flush_number, l.incarnation, l.shard, l.owned
        from wh_log l
        where l.segment = p_segment
            and l.position > (select r.noted_to from wh_rotation r where r.segment = p_segment)
        order by l.position
        limit 20000
    ), newest as (
        select p.incarnation, p.shard, max(p.flush_number) as flush_number
        from page p
        where p.incarnation in (select i.number from wh_instance i where i.state = 0)
        group by p.incarnation, p.shard
    ), noted as (
        insert into wh_flush_truncated as t (flush_number, xid, position, incarnation, shard, owned)
        select n.flush_number, min(p.xid), min(p.position), n.incarnation, n.shard, bool_and(p.owned)
        from newest n
        join page p using (incarnation, shard, flush_number)
        group by n.incarnation, n.shard, n.flush_number
        -- Several log rows of one flush may stand in two pages.
        on conflict (incarnation, shard) do update
        set flush_number = excluded.flush_number, xid = excluded.xid,
            position = case when t.flush_number = excluded.flush_number
                then least(t.position, excluded.position) else excluded.position end,
            owned = excluded.owned and (t.owned or t.flush_number < excluded.flush_number)
        where t.flush_number <= excluded.flush_number
    )
    select max(p.position), count(*) into v_to, v_count from page p;
    update wh_rotation r set noted_to = coalesce(v_to, r.noted_to), is_noted = v_count < 20000
    where r.segment = p_segment;
    return v_count < 20000;
end
$$;
