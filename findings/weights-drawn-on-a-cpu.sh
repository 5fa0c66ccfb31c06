#!/usr/bin/env bash
# torch 2.13.0: on CPUs, FSDP2 from the meta device gives every rank the same numbers as its part of a weight.
#
# One would guess: weights of a sharded model that are drawn with one seed on all ranks are those of the whole model, in parts,
# as torch promises for GPUs, where each rank gets its own piece of the random stream.
# What happens: on a CPU mesh each rank draws its part from the same beginning of its generator, so the parts are equal: on 2 ranks
# the lower half of a matrix is the upper half again, on 8 ranks there are 8 copies. With another seed on each rank
# what is sharded is right, and what is replicated differs. Nothing is said.
# Where it matters: a first checkpoint that is made on a machine without GPUs, and every comparison of layouts on gloo: rank and
# spectrum of each first matrix are wrong, and depend on the number of ranks. Draw whole, then distribute.
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
torch.manual_seed(0)
with torch.device("meta"):
    layer = nn.Linear(64, 64, bias=False)
fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
layer.to_empty(device="cpu")
layer.reset_parameters()
sharded = layer.weight.full_tensor()
torch.manual_seed(0)
whole = nn.Linear(64, 64, bias=False).weight
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, weight in (("sharded", sharded), ("whole", whole)):
        equal = torch.equal(weight[:32], weight[32:])
        print(f"{name}: halves are equal {equal}, rank {torch.linalg.matrix_rank(weight).item()} of 64")
dist.destroy_process_group()
sys.exit(not (torch.equal(sharded[:32], sharded[32:]) and torch.linalg.matrix_rank(whole) == 64))
EOF
bin/torchrun --standalone --nproc-per-node 2 observe.py 2>error.log || { grep -m 3 Error error.log >&2; false; } || exit 1
