#!/usr/bin/env bash
# datasets 5.2.0: after load_state_dict, every later epoch of a streamed data set begins in the middle too.
#
# One would guess: the state is the position in the epoch that was stopped; the next epoch begins at the beginning, as in a run
# that was not stopped.
# What happens: the state stays the start of each new iteration over the data set. A run that was resumed at 60 % of an epoch
# reads the last 40 % again and again; one that was resumed at the end of an epoch gets nothing any more. Nothing is said.
# set_epoch before each epoch avoids it.
# Where it matters: any resumed run of more than one epoch on an IterableDataset, directly or through a DataLoader; without
# shuffling nobody calls set_epoch.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-datasets==5.2.0} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import sys

import datasets


def data():
    return datasets.Dataset.from_dict({"i": list(range(10))}).to_iterable_dataset(num_shards=2)


def epochs(read: int, set_epoch: bool = False) -> list[list[int]]:
    stopped = data()
    rows = iter(stopped)
    for _ in range(read):
        next(rows)
    resumed = data()
    resumed.load_state_dict(stopped.state_dict())
    found = []
    for epoch in range(3):
        if set_epoch:
            resumed.set_epoch(epoch)
        found.append([row["i"] for row in resumed])
    return found


print("datasets", datasets.__version__, "- ten rows, three epochs after a resume")
middle, end, right = epochs(6), epochs(10), epochs(6, set_epoch=True)
print("resumed after six rows:", middle)
print("resumed after all ten:", end)
print("resumed after six, with set_epoch:", right)
rest, all_rows = [6, 7, 8, 9], list(range(10))
sys.exit(not (middle == [rest] * 3 and end == [[]] * 3 and right == [rest, all_rows, all_rows]))
EOF
bin/python observe.py || exit 1
