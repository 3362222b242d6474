-- finish_inbox: kept messages that were handled after all: their rows go, in the transaction of their effects. First of
-- all in it: only who was still there may leave effects.
-- in: p_consumer; p_message_ids    out: whether it was there, an element an id, in input order; of the same id the first
-- locks: the rows, by ascending id    cost: a probe and a deletion an id
create or replace function @schema@.finish_inbox(p_consumer int2, p_message_ids uuid[]) returns bool[]
language sql volatile
as $$
    with given as (
        select g.message_id, g.turn, row_number() over (partition by g.message_id order by g.turn) as nth
        from unnest(p_message_ids) with ordinality g(message_id, turn)
    ), locked as materialized (
        select i.ctid as place, i.message_id from @schema@.wh_inbox i
        where i.consumer = p_consumer and i.message_id = any (p_message_ids)
        order by i.message_id
        for update
    ), gone as (
        delete from @schema@.wh_inbox i
        using locked l
        where i.ctid = l.place and i.consumer = p_consumer and i.message_id = l.message_id
        returning i.message_id
    )
    select coalesce(array_agg(d.message_id is not null and g.nth = 1 order by g.turn), '{}')
    from given g
    left join gone d on d.message_id = g.message_id
$$;
