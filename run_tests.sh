#!/usr/bin/env bash
# Run the tests, setting up all they need on the way:
#   ./run_tests.sh [--fast | --soak | --gpu] [pytest arguments]
# --fast runs the core of them, while you work.
# --soak runs the long ones instead of the usual ones, --gpu those that need a GPU, which the others hide.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

EXTRA="[dev]" source "$here/scripts/set_up.sh"
cd "$here"
exec "$PYTHON" -m pytest "$@"
