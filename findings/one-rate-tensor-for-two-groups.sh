#!/usr/bin/env bash
# torch 2.13.0: parameter groups that share a learning rate given as a tensor share it for ever.
#
# One would guess: lr=torch.tensor(1e-3), which a compiled or captured optimizer step asks for, is a default that each
# parameter group gets; a LambdaLR with a function for each group then gives each its own rate, as with a float.
# What happens: all groups hold the one tensor, and the scheduler fills it in place. The last group's rate becomes the rate
# of all. Nothing is said.
# Where it matters: separate rates or schedules for embeddings, matrices and vectors, as soon as the step is compiled: the model
# trains at the rate of whichever group is last. A tensor for each group, in its dictionary, avoids it.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-torch==2.13.0 numpy==2.3.5} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import sys

import torch
from torch.optim.lr_scheduler import LambdaLR


def rates(lr, own: bool = False) -> list[float]:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    for group in groups if own else ():
        group["lr"] = lr.clone()
    optimizer = torch.optim.AdamW(groups, lr=lr)
    scheduler = LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1])
    optimizer.step()
    scheduler.step()
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


print("torch", torch.__version__)
number, tensor, own = rates(1e-2), rates(torch.tensor(1e-2)), rates(torch.tensor(1e-2), own=True)
print("rates of two groups, 1 and 0.1 times 0.01: given as a float", number)
print("given as one tensor", tensor)
print("given as a tensor for each group", own)
sys.exit(not (number == own == [0.01, 0.001] and tensor == [0.001, 0.001]))
EOF
bin/python observe.py || exit 1
