#!/usr/bin/env bash
# Set up everything and train a config:
#   ./run_llama_train.sh [CONFIG.toml] [--section.key value ...]
#   ./run_llama_train.sh [CONFIG.toml] --help [WORD]     all keys, or those with WORD: description and value
# CONFIG defaults to train_configs/debug.toml. NGPU sets the number of processes (default: one per GPU, or 1).
# Relative paths inside configs and overrides are relative to the repository root.
set -euo pipefail
unset CDPATH  # with it cd prints the folder
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

config=$here/train_configs/debug.toml
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
exec "$PYTHON" -m pc_recipe.runs.local "$config" "$@"
