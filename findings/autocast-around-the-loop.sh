#!/usr/bin/env bash
# torch 2.13.0: with torch.autocast around a whole training loop, the weights move and the model does not.
#
# One would guess: autocast casts each weight when it is used, so whether it stands around the forward pass or around the
# loop is a matter of taste.
# What happens: until the outermost autocast block ends, the low-precision copy of a weight that was made first is used
# again, also after the optimizer has changed the weight. The loss stays what it was, gradients are never None, weights and
# their norms change at every step, and nothing is said.
# Where it matters: a loop with its step inside one `with torch.autocast(...)`, or an evaluation in the block that has
# just trained. On fresh data each batch has another loss, so that a flat curve looks like a rate that is too low.
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
from contextlib import nullcontext

import torch
from torch import nn


def losses(around_the_loop: bool) -> list[float]:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(16, 8)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    before = model.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16) if around_the_loop else nullcontext():
        for _ in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(round(loss.item(), 4))
    print(f"around the {'loop' if around_the_loop else 'forward pass'}: losses {found},", end=" ")
    print(f"the weights moved by {(model.weight - before).norm():.2f}")
    return found


print("torch", torch.__version__)
loop, forward = losses(True), losses(False)
sys.exit(not (len(set(loop)) == 1 and forward[-1] < forward[0] / 2))
EOF
bin/python observe.py || exit 1
