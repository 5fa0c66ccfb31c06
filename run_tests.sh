#!/usr/bin/env bash
# Set up everything and run the tests:
#   ./run_tests.sh [--all | --fast | --soak | --gpu] [pytest arguments]
# Without arguments it runs tests/unit, each test in one process, in seven minutes on two cores.
# --all runs all but the long tests.
# --fast runs only the core tests.
# --soak runs only the long tests, --gpu only those that need a GPU; the others hide the GPU.
# --soak alone also prints when all long tests ran last and how that ended, and records this run in tests/last_soak.txt.
# Without --soak and --gpu, tests run in parallel on all cores, at most 8.
set -euo pipefail
unset CDPATH  # with it cd prints the folder
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

EXTRA="[dev]"
source "$here/scripts/set_up.sh"
set_up
if [[ $# == 0 ]]; then
    set -- tests/unit
elif [[ $1 == --all ]]; then
    shift
fi
# one process runs a whole file, whose tests share fixtures; in order of name, so that the quick tests/unit is last
side_by_side=(--numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
[[ " $* " == *" --soak "* || " $* " == *" --gpu "* ]] && side_by_side=()
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # parallel tests should use one thread each
# as in the launchers (pc_recipe/runs/launch.py): tests free and allocate large tensors too
export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}
[[ "$*" == --soak ]] || exec "$PYTHON" -m pytest "${side_by_side[@]}" "$@"

echo "last run of all long tests: $(cat tests/last_soak.txt 2>/dev/null || echo none)"
commit=$(git describe --always --dirty)
"$PYTHON" -m pytest --soak | tee /dev/stderr | tail -n 1 > tests/last_soak.new && status=0 || status=$?
echo "$(date -u +%F), $commit: $(tr -d = < tests/last_soak.new | xargs)" > tests/last_soak.txt
rm tests/last_soak.new
exit "$status"
