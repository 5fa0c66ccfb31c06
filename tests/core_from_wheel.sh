#!/usr/bin/env bash
# Run the core's tests on an installed package, from a copy outside this checkout:
#   tests/core_from_wheel.sh PYTHON
# The interpreter needs pc-layer (which brings torch) and pytest, and nothing else.
set -euo pipefail
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$tests" "$copy/tests"
cd "$copy"
"$1" -c 'import pc, sys; sys.exit("pc is imported from the checkout" if pc.__file__.startswith(sys.argv[1]) else 0)' "${tests%/tests}"
"$1" -m pytest -q --noconftest -p no:cacheprovider -o pythonpath=tests \
    tests/unit/pc/test_{attach,effective_weight,method,owner,polynomial,preconditioner,preconditioner_mistakes,spectral,preserve}.py
