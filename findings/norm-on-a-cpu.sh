#!/usr/bin/env bash
# torch 2.13.0: the norm of a large float32 tensor on a CPU is too small, by more than a percent at the size of an embedding.
#
# One would guess: torch.linalg.vector_norm, Tensor.norm and clip_grad_norm_ are exact to six digits, as sum() is, which adds in
# pairs.
# What happens: squares are added one after the other into a few float32 sums, whose roundings pile up. At 32,000 x 4,096 a norm
# of 228.98 comes out as 225.36, whatever the number of threads; at 8 million numbers it is 0.03 % too small.
# x.square().sum().sqrt() is right.
# Where it matters: gradients that are offloaded to the CPU are clipped by such a norm, which then depends on the number of ranks
# that share a tensor; so do logged norms of weights, and those of a checkpoint that is compared on another layout.
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

print("torch", torch.__version__)
torch.manual_seed(0)
weight = torch.randn(32_000 * 4_096).mul_(0.02)
right = sum(part.double().square().sum() for part in weight.split(2**24)).sqrt().item()
off = {}
for threads in (1, 2):
    torch.set_num_threads(threads)
    found = torch.linalg.vector_norm(weight).item()
    off[threads] = 1 - found / right
    print(f"{threads} threads: vector_norm {found:.3f}, in float64 {right:.3f}: {off[threads]:.2%} too small")
by_sum = weight.square().sum().sqrt().item()
print(f"square().sum().sqrt(): {by_sum:.3f}")
parameter = torch.nn.Parameter(weight)
parameter.grad = weight
torch.set_num_threads(1)
print(f"clip_grad_norm_: {torch.nn.utils.clip_grad_norm_([parameter], 1e9).item():.3f}")
sys.exit(not (off[1] > 0.01 and abs(1 - by_sum / right) < 1e-5))
EOF
bin/python observe.py || exit 1
