#!/usr/bin/env bash
# torch 2.13.0: with tensor parallelism and compiled blocks, the embedding in front of them gets no gradient.
#
# One would guess: compiling the blocks of a model that is parallelised by parallelize_module changes speed, not gradients; what
# cannot be differentiated raises.
# What happens: the output of a RowwiseParallel embedding is a collective in flight, a tensor subclass. A block compiled by AOT
# autograd (also by inductor, the default) loses the gradient of such an input. The embedding's gradient is None, so that
# optimizers skip it; the rest trains. Eager blocks, and an operation such as clone() on the embedding's output, give
# the right gradient.
# Where it matters: tensor parallelism with compiled blocks, the usual set-up of large runs: the embedding keeps its
# first values.
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
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.simplefilter("ignore")
dist.init_process_group("gloo")


class Model(nn.Module):
    def __init__(self, compiled: bool, clone: bool):
        super().__init__()
        self.embedding, self.clone = nn.Embedding(8, 4), clone
        self.block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "block.0": ColwiseParallel(input_layouts=Shard(1)),
            "block.1": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self, dist.init_device_mesh("cpu", (2,)), plan)
        if compiled:
            self.block.compile(backend="aot_eager", fullgraph=True)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.block(x.clone() if self.clone else x)


def gradients(compiled: bool, clone: bool = False) -> tuple[float | None, float]:
    torch.manual_seed(0)
    model = Model(compiled, clone)
    model(torch.arange(8).reshape(2, 4)).square().mean().backward()
    sizes = [p.grad if p.grad is None else p.grad.full_tensor().norm().item() for p in model.parameters()]
    return sizes[0], sizes[1]


found = {"eager block": gradients(False), "compiled block": gradients(True), "with clone()": gradients(True, clone=True)}
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, (embedding, block) in found.items():
        print(f"{name}: norm of the gradient of the embedding {embedding}, of the block's first weight {block:.4f}")
dist.destroy_process_group()
eager, compiled, cloned = found.values()
near = eager[0] is not None and cloned[0] is not None and abs(eager[0] - cloned[0]) < 1e-5
sys.exit(not (near and compiled[0] is None and abs(eager[1] - compiled[1]) < 1e-5))
EOF
bin/torchrun --standalone --nproc-per-node 2 observe.py 2>error.log || { grep -m 3 Error error.log >&2; false; } || exit 1
