-- wh_json: bytes as jsonb where they are JSON by their content type and in fact; null otherwise, never an error.
--
--     select version, wh_json(content_type, payload) ->> 'customer' from corelane.wh_event_store where …
--
-- in: p_content_type (null: application/json); p_bytes
-- out: jsonb; null for another content type, for what is not JSON, and for JSON that jsonb cannot hold (\u0000, lone
--     surrogates, numbers beyond numeric, nesting beyond max_stack_depth). jsonb keeps the last of doubled keys, and no order
-- immutable, so that it can be indexed: see "Events as JSON" in sql/README.md
-- locks: none    cost: parses the bytes under a savepoint: some µs
create or replace function @schema@.wh_json(p_content_type text, p_bytes bytea) returns jsonb
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_bytes is null or not coalesce(
        btrim(split_part(p_content_type, ';', 1)) ~* '^(application/json|.*\+json|)$', true)
    then
        return null;
    end if;
    return convert_from(p_bytes, 'UTF8')::jsonb;
exception
    when data_exception or program_limit_exceeded then
        return null;
end
$$;
