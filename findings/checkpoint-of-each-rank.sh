#!/usr/bin/env bash
# torch 2.13.0: what each rank gives torch.distributed.checkpoint under one name becomes one rank's for all.
#
# One would guess: every rank saves its state and reads its own again, or a name with several values is refused.
# What happens: tensors and objects that are not DTensors count as copies of each other. One rank's is written, another rank's
# for another name, since the work is shared; at load every rank gets it. Nothing is said, at save or at load.
# Where it matters: random states, positions and buffers of a data loader, running statistics: after a resume all ranks draw
# the same dropout or read the same documents, and the effective batch is one rank's. Names with the rank in them avoid it.
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
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
state = {"random": torch.get_rng_state(), "position": torch.tensor([100 + rank]), "loader": {"file": f"part-{rank}"}}
dcp.save(state, checkpoint_id="step-1")
found = {"random": torch.zeros_like(state["random"]), "position": torch.zeros(1, dtype=torch.long), "loader": {"file": ""}}
dcp.load(found, checkpoint_id="step-1")
same = torch.equal(found["random"], state["random"])
mine = (rank, int(state["position"]), state["loader"]["file"]), (int(found["position"]), found["loader"]["file"], same)
ranks = [None, None]
dist.all_gather_object(ranks, mine)
if rank == 0:
    print("torch", torch.__version__)
    for (number, position, file), (position_found, file_found, same) in ranks:
        whose = "its own" if same else "another's"
        print(f"rank {number} saved {position}, {file}; it got {position_found}, {file_found}, and {whose} random state")
dist.destroy_process_group()
after = [found for _, found in ranks]
sys.exit(not (after[0][:2] == after[1][:2] and sorted(same for *_, same in after) == [False, True]))
EOF
bin/torchrun --standalone --nproc-per-node 2 observe.py 2>error.log || { grep -m 3 Error error.log >&2; false; } || exit 1
