#!/usr/bin/env bash
# torch 2.13.0: .item() and float() of a DTensor that waits for its sum give one rank's part.
#
# One would guess: a Python number needs the whole value, so .item() adds over the ranks, as full_tensor() does, or refuses.
# What happens: the sum or mean of a sharded tensor is a DTensor with the placement Partial, and .item() returns what this
# rank holds of it. Each rank gets another number; on a mean each rank's own is a plausible one. With a replicated
# tensor the same line is right, and so it is on one GPU.
# Where it matters: logged means and sums of sharded weights, and whatever decides by such a number: ranks decide differently, in
# silence. full_tensor() before .item() avoids it.
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
from torch.distributed.tensor import Shard, distribute_tensor

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
torch.manual_seed(0)
whole = torch.randn(8, 5)
weight = distribute_tensor(whole, dist.init_device_mesh("cpu", (2,)), [Shard(0)])
numbers = [None, None]
dist.all_gather_object(numbers, (weight.sum().item(), float(weight.mean()), weight.sum().full_tensor().item()))
placement = weight.sum().placements
right = whole.sum().item(), whole.mean().item(), whole.sum().item()
if dist.get_rank() == 0:
    print("torch", torch.__version__, "- the sum of a sharded tensor has placements", placement)
    for number, found in {"rank 0": numbers[0], "rank 1": numbers[1], "right": right}.items():
        print("{}: sum().item() {:.4f}, float(mean()) {:.4f}, sum().full_tensor().item() {:.4f}".format(number, *found))
dist.destroy_process_group()
gathered = all(abs(found[2] - right[0]) < 1e-4 for found in numbers)
sys.exit(not (gathered and all(abs(found[0] - right[0]) > 0.1 for found in numbers)))
EOF
bin/torchrun --standalone --nproc-per-node 2 observe.py 2>error.log || { grep -m 3 Error error.log >&2; false; } || exit 1
