"""Measure the machines of a run before it starts, and name the rank that is slower than the others.

In an allocation:    srun --ntasks-per-node=8 .venv/bin/python scripts/preflight.py outputs
on one machine:      torchrun --nproc-per-node=8 scripts/preflight.py outputs
"""

import argparse
from pathlib import Path

from pc.errors import exit_on_user_error


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder on the file system that the run writes to")
    arguments = parser.parse_args()
    import torch.distributed as dist

    from pc_recipe.runs import preflight

    device = preflight.join_ranks()
    ranks = preflight.measure(arguments.folder, device, preflight.ON_GPU if device.type == "cuda" else preflight.ON_CPU)
    if dist.get_rank() == 0:
        findings = preflight.find_slow_ranks(ranks) or [f"all {len(ranks)} ranks agree"]
        print("\n".join([preflight.table(ranks), *findings]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
