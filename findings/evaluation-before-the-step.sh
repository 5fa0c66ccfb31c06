#!/usr/bin/env bash
# torch 2.13.0: FSDP2 trains on old weights after a pass without gradients between the backward pass and the step.
#
# One would guess: a forward pass under no_grad changes nothing, wherever it stands.
# What happens: it leaves the weights of the outermost FSDP module (by the usual wrapping the embedding, the last norm and the
# head) gathered, since only a backward pass would release them. The optimizer then changes the shards, and the next forward
# pass computes with the gathered weights of before. Losses differ from those of one process from there on; nothing is said.
# Until the next backward pass model.parameters() of these are plain tensors, no DTensors, too.
# Where it matters: a loss on the same batch for a line search, sharpness or a generation sample taken between loss.backward()
# and optimizer.step(). model.reshard() after such a pass avoids it.
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
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
dist.init_process_group("gloo")


def losses(sharded: bool, evaluate: bool, reshard: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
    if sharded:
        mesh = dist.init_device_mesh("cpu", (2,))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer, x, found = torch.optim.SGD(model.parameters(), lr=0.3), torch.randn(8, 4), []
    for _ in range(4):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if evaluate:
            with torch.no_grad():
                model(x)
            if reshard:
                model.reshard()
        optimizer.step()
        found.append(round(loss.item(), 4))
    return found


one = losses(False, True)
found = {
    "FSDP2": losses(True, False),
    "FSDP2, with a pass without gradients before each step": losses(True, True),
    "the same, and model.reshard() after the pass": losses(True, True, reshard=True),
}
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, values in {"one process": one, **found}.items():
        print(f"{name}: losses {values}")
dist.destroy_process_group()
plain, stale, fine = found.values()
sys.exit(not (plain == fine == one and stale[0] == one[0] and stale != one))
EOF
bin/torchrun --standalone --nproc-per-node 2 observe.py 2>error.log || { grep -m 3 Error error.log >&2; false; } || exit 1
