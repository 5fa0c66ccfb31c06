#!/usr/bin/env bash
# Train sweeps, N runs at a time, one thread each, at the lowest priority; all arms of a seed before the next seed. Repeat to
# continue. SIGTERM or Ctrl-C saves and stops.
#   experiments/verdict/run.sh N SWEEP.toml...
set -u
number=$1
shift
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
children=()
stop() {
    stopped=yes
    kill -TERM "${children[@]}" 2>/dev/null
}
trap stop TERM INT
for ((i = 0; i < number; i++)); do
    [[ -z ${stopped:-} ]] || break
    nice -n 19 "${PYTHON:-python}" scripts/sweep.py run "$@" &
    children+=($!)
    sleep 5
done
worst=0
for child in "${children[@]}"; do
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do  # a signal came, which `stop` has handed on
        wait "$child"
        status=$?
    done
    ((status <= worst)) || worst=$status
done
exit $worst
