-- check_installation: whether this installation may be worked with where it stands now.
-- in: nothing
-- out: fits bool; why_not text (null if it fits); partition_count int4; generation int4
-- Transaction ids, and so cursors, mean nothing on another server or in a copy: after a logical restore, a copy of the
-- database or pg_upgrade the engine does not start until `corelane rebase` has rewritten them.
-- locks: none    cost: reads the server's control file
create or replace function @schema@.check_installation(
    out fits bool, out why_not text, out partition_count int4, out generation int4)
language plpgsql stable
set search_path = @schema@, pg_temp
as $$
declare
    v_here int8;
    v_database oid;
    v_installation wh_installation;
begin
    select c.system_identifier into v_here from pg_catalog.pg_control_system() c;
    select d.oid into v_database from pg_catalog.pg_database d where d.datname = pg_catalog.current_database();
    select i.* into v_installation from wh_installation i;
    partition_count := v_installation.partition_count;
    generation := v_installation.generation;
    if v_installation.only_row is null then
        why_not := 'the installation has no row in wh_installation: the migration did not end';
    elsif v_installation.system_identifier <> v_here then
        why_not := pg_catalog.format('it was made on server %s and is now on server %s (a restored dump, a logical copy or an '
            'upgraded server): stop what works with it, then run `corelane rebase`',
            v_installation.system_identifier, v_here);
    elsif v_installation.database_oid <> v_database then
        why_not := pg_catalog.format('it was made in another database of this server (oid %s, this one has %s), so this is a copy: '
            'run `corelane rebase` if it is to work on its own', v_installation.database_oid, v_database);
    end if;
    fits := why_not is null;
end
$$;
