#!/bin/sh
# A worker in another language: it shares the partitions with the engines of its service, and needs nothing but SQL.
#
#   worker.sh CONNECTION SCHEMA SERVICE PUBLISH
#
# PUBLISH is run for each message: its arguments are message id, destination, stream id (or -), number in the stream and
# fence, its standard input is the payload. If it fails, so has the message.
#
# What it must keep to, and a worker in any language must:
# - A new id at each start, and another one when its lease is lost. What it has in hand is not its own any more then.
# - It publishes only what was committed to it (psql commits each statement), and nothing once its lease is over.
# - Messages of one stream and destination in the order they come; behind one that fails, none.
# - An answer that is lost may have handed something out: it asks for all it has in hand (flag 2).
set -u
connection=$1 schema=$2 service=$3 publish=$4
lease=${WORKER_LEASE_SECONDS:-10} rows=${WORKER_ROWS:-50} pause=${WORKER_PAUSE_SECONDS:-0.2}
answer=$(mktemp) && trap 'rm -f "$answer"' EXIT

new_id() { cat /proc/sys/kernel/random/uuid 2>/dev/null || uuidgen; }

# call FLAGS: reports what is published and what failed, and asks for more; one line a message.
call() {
    psql -X -q -A -t -F ' ' -v ON_ERROR_STOP=1 "$connection" >"$answer" <<SQL
set search_path = $schema;
set statement_timeout = '${lease}s';
select source, lease_lost, message_id, destination, coalesce(stream_id::text, '-'), stream_seq, fence,
    translate(encode(payload, 'base64'), E'\n', '')
from process_work_batch('$id', '$service', '$(hostname)', $$, p_lease_seconds => $lease, p_flags => $1,
    p_max_rows => $rows, p_outbox_completions => '{$done}', p_outbox_completion_destinations => '{$done_to}',
    p_outbox_failures => '{$failed}', p_outbox_failure_destinations => '{$failed_to}')
where source in ('call', 'outbox');
SQL
}

id=$(new_id) flags=0 done='' done_to='' failed='' failed_to=''
while :; do
    asked=$(date +%s)
    if ! call "$flags"; then
        flags=2 # What was reported is reported again with it: twice does no harm.
        sleep "$pause"
        continue
    fi
    flags=0 done='' done_to='' failed='' failed_to='' halted=' ' count=0
    while read -r source lost message destination stream number fence payload; do
        if [ "$lost" = t ]; then
            id=$(new_id)
            break
        fi
        [ "$source" = outbox ] || continue
        # Half a lease is for publishing: what is left then comes again by flag 2.
        if [ $(($(date +%s) - asked)) -ge $((lease / 2)) ]; then
            flags=2
            break
        fi
        [ "$stream" = - ] || case $halted in *" $stream/$destination "*) continue ;; esac
        count=$((count + 1))
        if printf %s "$payload" | base64 -d | $publish "$message" "$destination" "$stream" "$number" "$fence"; then
            done=${done:+$done,}$message done_to=${done_to:+$done_to,}\"$destination\"
        else
            failed=${failed:+$failed,}$message failed_to=${failed_to:+$failed_to,}\"$destination\"
            halted="$halted$stream/$destination "
        fi
    done <"$answer"
    [ "$count" -gt 0 ] || sleep "$pause"
done
