# Sourced by run_llama_train.sh and run_tests.sh, which then call set_up: it sets PYTHON to an interpreter with the project
# installed. Uses the active environment, or creates .venv at the repository root. Quick if everything is installed:
# a stamp in the environment holds the checksum of what was installed. EXTRA is "[recipe]", the default, or
# "[dev]", which also has the dependencies of the tests.

fail() {
    echo "error: $*" >&2
    exit 2
}

# Free space at the repository root in GiB, rounded down.
free_gib() {
    df -Pk "$ROOT" | awk 'NR == 2 {print int($4 / 1048576)}'
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_environment() {
    if [[ -n "${VIRTUAL_ENV:-}" ]]; then
        ENVIRONMENT=$VIRTUAL_ENV
    elif [[ -n "${CONDA_PREFIX:-}" && "${CONDA_DEFAULT_ENV:-base}" != base ]]; then
        ENVIRONMENT=$CONDA_PREFIX
    else
        ENVIRONMENT=$ROOT/.venv
    fi
    PYTHON=$ENVIRONMENT/bin/python
}

make_environment_if_needed() {
    if [[ "$ENVIRONMENT" == "$ROOT/.venv" ]] && ! is_new_enough "$PYTHON"; then
        make_environment
    fi
    is_new_enough "$PYTHON" ||
        fail "Python 3.11 or newer is needed; $ENVIRONMENT has $("$PYTHON" --version 2>&1 || echo none)"
}

make_environment() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if is_new_enough "$candidate"; then
            [[ "$(free_gib)" -ge 8 ]] || fail "8 GiB of free disk are needed to install; $ROOT has $(free_gib) GiB"
            echo "Making the environment $ENVIRONMENT with $("$candidate" --version)"
            "$candidate" -m venv --clear "$ENVIRONMENT" >/dev/null ||
                fail "$candidate cannot make an environment; on Debian and Ubuntu: apt-get install python3-venv"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; python3 here is $(python3 --version 2>&1 || echo missing)"
}

# What the stamp of an up-to-date environment says.
wanted() {
    echo "$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum) $ROOT"
}

is_installed() {
    local stamp=$ENVIRONMENT/.pc-layer-installed
    # the extra "dev" includes all the others
    [[ "$(cat "$stamp$EXTRA" 2>/dev/null)" == "$(wanted)" || "$(cat "$stamp[dev]" 2>/dev/null)" == "$(wanted)" ]]
}

install_project() {
    # not by --constraint, which does not reach build dependencies; added to what a container sets
    export PIP_CONSTRAINT="${PIP_CONSTRAINT:-} constraints.txt" PIP_BUILD_CONSTRAINT=constraints.txt
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null 2>&1 ||
        fail "$ENVIRONMENT has no pip; install pip there or deactivate it"
    # torch first, so that the pin decides and not a dependency
    if ! "$PYTHON" -c 'import sys; from importlib.metadata import version
sys.exit(not (2, 11) <= tuple(map(int, version("torch").split(".")[:2])) < (2, 16))' 2>/dev/null; then
        [[ "$(free_gib)" -ge 8 ]] || fail "8 GiB of free disk are needed to install torch; $ROOT has $(free_gib) GiB"
        echo "Installing torch 2.13.0 (once, some minutes)"
        "$PYTHON" -m pip install --quiet torch==2.13.0 || fail "torch could not be installed; see above"
    fi
    [[ "$(free_gib)" -ge 2 ]] || fail "2 GiB of free disk are needed to install; $ROOT has $(free_gib) GiB"
    echo "Installing the project and its dependencies into $ENVIRONMENT"
    [[ "$ENVIRONMENT" == "$ROOT/.venv" ]] ||
        echo "It was active: packages in it change to the versions of constraints.txt. Deactivate it to use $ROOT/.venv instead"
    "$PYTHON" -m pip install --quiet --editable "$ROOT$EXTRA" || fail "the project could not be installed; see above"
    wanted >"$ENVIRONMENT/.pc-layer-installed$EXTRA"
}

set_up() {
    if is_new_enough "$PYTHON" && is_installed; then return; fi
    exec 9<"$ROOT/scripts"
    if command -v flock >/dev/null && ! flock -n 9 2>/dev/null; then
        echo "Waiting for another process that is installing"
        flock 9 || true  # some file systems have no locks
    fi
    make_environment_if_needed 9<&-
    is_installed || install_project 9<&-
    exec 9<&-
}

EXTRA=${EXTRA:-[recipe]}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"  # in the caller's folder, Python could run a pip.py from there
find_environment
