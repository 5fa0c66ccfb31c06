#!/usr/bin/env bash
# Train a small Llama 2 twice, without and with PC, and write a page that compares them:
#   ./run_llama_train.sh
# Train a config, or continue its run; any of its keys can be overridden:
#   ./run_llama_train.sh CONFIG.toml [--section.key value ...]
#   ./run_llama_train.sh CONFIG.toml --help [WORD]     all keys, or those with WORD: description and value
# Set up the environment and do nothing else; each of the above does so first:
#   ./run_llama_train.sh --setup
# NGPU sets the number of processes (default: one per GPU, or 1).
# Relative paths inside configs and overrides are relative to the repository root.
set -euo pipefail
unset CDPATH  # with it cd prints the folder
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

config=
if [[ $# -gt 0 && "$1" != -* ]]; then
    if [[ -f "$1" ]]; then
        config=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
    elif [[ -f "$here/$1" ]]; then
        config=$here/$1
    else
        echo "error: no config $1; configs are in $here/train_configs" >&2
        exit 2
    fi
    shift
fi

source "$here/scripts/set_up.sh"
if [[ " $* " == *" --help"* || " $* " == *" -h "* ]] && ! is_installed; then
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "$here/run_llama_train.sh"
    echo "Keys can be described only after ./run_llama_train.sh --setup"
    exit
fi
set_up
if [[ "$*" == --setup ]]; then
    echo "Ready. For the Python commands: source $ENVIRONMENT/bin/activate"
    exit
fi
demo=$here/train_configs/demo.toml
if [[ -n "$config" || " $* " == *" --help"* || " $* " == *" -h "* ]]; then
    exec "$PYTHON" -m pc_recipe.runs.local "${config:-$demo}" "$@"
fi
runs=outputs/demo
export NGPU=${NGPU:-1}  # the demo's steps are too small to be shared
"$PYTHON" -m pc_recipe.runs.local "$demo" --pc.enable false --job.dump_folder $runs/baseline "$@"
"$PYTHON" -m pc_recipe.runs.local "$demo" --job.dump_folder $runs/pc "$@"
exec "$PYTHON" scripts/report.py $runs/baseline $runs/pc --output $runs/report.html
