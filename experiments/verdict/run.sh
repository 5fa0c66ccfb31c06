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
trap 'kill -TERM "${children[@]}"' TERM INT
for ((i = 0; i < number; i++)); do
    nice -n 19 "${PYTHON:-python}" scripts/sweep.py run "$@" &
    children+=($!)
    sleep 5
done
while true; do
    wait
    status=$?
    [[ $status -le 128 ]] && break  # a signal came: the trap has handed it on
done
exit $status
