-- compute_partition: from a stream id (or the message id where there is no stream) to its partition.
-- in: id uuid, partition_count int4 (at least 1)    out: int4 in 0 .. partition_count - 1
-- The same arithmetic as src/partition.rs, held together by tests/golden/partition.txt: the id's four big-endian
-- 32-bit words, each times an odd constant, summed (below 2^63), shifted right by 20, modulo the count. Here the words
-- are spelt as bytes: each factor below is the word's constant shifted to the byte's place. No server hash function:
-- stored rows depend on the value, and those may change with a major version.
-- locks: none    cost: one expression, inlined into the calling statement
create or replace function @schema@.compute_partition(id uuid, partition_count int4) returns int4
language sql immutable strict parallel safe
as $$
    select (((
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 0) * 8003291233386496::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 1) * 31262856380416::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 2) * 122120532736::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 3) * 477033331::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 4) * 7748488540454912::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 5) * 30267533361152::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 6) * 118232552192::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 7) * 461845907::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 8) * 7272829804347392::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 9) * 28409491423232::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 10) * 110974575872::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 11) * 433494437::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 12) * 8505245101457408::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 13) * 33223613677568::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 14) * 129779740928::int8 +
        pg_catalog.get_byte(pg_catalog.uuid_send(id), 15) * 506952113::int8
    ) >> 20) % partition_count)::int4
$$;
