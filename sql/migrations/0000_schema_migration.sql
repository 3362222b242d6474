-- What is applied in this schema. Made by the installer before the first migration; never changed by one.
create table @schema@.wh_schema_migration (
    kind text not null check (kind in ('migration', 'function')),
    name text not null,
    hash text not null, -- SHA-256 of the file as it is in the library, before the schema's name is put in
    schema_version int4 not null,
    library_version text not null,
    applied_at timestamptz not null default clock_timestamp(),
    primary key (kind, name)
);
