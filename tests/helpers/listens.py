"""In place of the trainer: a rank writes where it, its launcher and its children listen, to listens.<rank>.json beside the
config that it is given."""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import pc_recipe.runs.worker  # noqa: F401 (what it decides is tested)
from helpers.slurm_cluster import descendants


def main() -> None:
    folder = Path(sys.argv[1]).parent
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    save = dcp.async_save(  # by a process of torch's own, whose process group is a second one
        {"w": torch.ones(1)}, checkpoint_id=folder / "saved", async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    save.result()
    mine = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    found = sorted({address for pid in descendants(mine) for address in listening(pid)})
    (folder / f"listens.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def listening(pid: int) -> list[str]:
    """Addresses, as the kernel writes them, of a process's listening TCP sockets: 0100007F is 127.0.0.1."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {match[1] for match in map(re.compile(r"socket:\[(\d+)\]").fullmatch, links) if match}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]


if __name__ == "__main__":
    main()
