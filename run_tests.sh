#!/usr/bin/env bash
# Run the tests, setting up all they need on the way:
#   ./run_tests.sh [--fast | --soak | --gpu] [pytest arguments]
# --fast runs the core of them, while you work.
# --soak runs the long ones instead of the usual ones, --gpu those that need a GPU, which the others hide.
# The usual ones run side by side on all cores, at most 8.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

EXTRA="[dev]" source "$here/scripts/set_up.sh"
cd "$here"
side_by_side=(--numprocesses auto --maxprocesses 8 --dist loadgroup)
[[ " $* " == *" --soak "* || " $* " == *" --gpu "* ]] && side_by_side=()
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # what runs side by side should not share each core's threads
# as the launchers set it (pc/launch/torchrun.py): large tensors come and go in tests too
export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}
exec "$PYTHON" -m pytest "${side_by_side[@]}" "$@"
