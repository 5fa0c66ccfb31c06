#!/usr/bin/env bash
# torch 2.13.0: CosineAnnealingLR forgets the new length when a run is extended, and then climbs back to the full rate.
#
# One would guess: a scheduler made with T_max=200 that loads the state of one with T_max=100 goes on by a cosine of 200 steps;
# at worst it refuses.
# What happens: the state has T_max, eta_min and the base rates too, and load_state_dict puts them back without a word. The rate
# is 0 at step 100, as in the old run, and rises to its old maximum at step 200. A new learning rate given to the optimizer
# is lost in the same way.
# Where it matters: any run that is extended, or resumed with another rate, by its configuration. LambdaLR does not do this:
# functions are not saved, so that there the new one counts.
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
import math
import sys

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR


def make(steps: int):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, CosineAnnealingLR(optimizer, T_max=steps)


def run(optimizer, scheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


print("torch", torch.__version__)
first = make(100)
run(*first, 50)
longer = make(200)
for new, old in zip(longer, first):
    new.load_state_dict(old.state_dict())
rates = run(*longer, 150)
print("made with T_max=200, resumed at step 50 of 100; T_max is now", longer[1].T_max)
for step in (100, 150, 200):
    print(f"step {step}: rate {rates[step - 51]:.3f}, a cosine of 200 steps has {(1 + math.cos(math.pi * step / 200)) / 2:.3f}")
sys.exit(not (rates[49] < 1e-9 and rates[-1] > 0.999))
EOF
bin/python observe.py || exit 1
