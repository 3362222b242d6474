-- wh_carry_numbers: goes on writing the last numbers of a segment's streams to wh_stream, where they outlive it: a
-- number is never given twice.
-- in: p_segment (it has a row in wh_rotation, made in an earlier statement)    out: whether all are carried
-- locks: rows of wh_stream    cost: at most 20,000 streams a call
create or replace function @schema@.wh_carry_numbers(p_segment int2) returns bool
language plpgsql volatile
set search_path = @schema@, pg_temp
set jit = off
as $$
declare
    v_last uuid;
    v_count int4;
begin
    with lane as (
        -- Rows without a stream have a lane of their own and nothing to carry.
        select o.lane_id, max(o.stream_seq) as last_seq
        from wh_outbox o
        where o.segment = p_segment and o.stream_id is not null
            and o.lane_id > (select r.carried_to from wh_rotation r where r.segment = p_segment)
        group by o.lane_id
        order by o.lane_id
        limit 20000
    ), carried as (
        insert into wh_stream (last_seq, stream_id)
        select l.last_seq, l.lane_id from lane l
        on conflict (stream_id) do update set last_seq = excluded.last_seq
        where wh_stream.last_seq < excluded.last_seq
    )
    select (array_agg(l.lane_id order by l.lane_id desc))[1], count(*) into v_last, v_count from lane l;
    update wh_rotation r set carried_to = coalesce(v_last, r.carried_to), is_carried = v_count < 20000
    where r.segment = p_segment;
    return v_count < 20000;
end
$$;
