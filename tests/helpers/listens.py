"""Replaces the trainer: each rank writes the addresses on which it, its launcher and its children listen to
listens.<rank>.json, beside its config."""

import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import pc_recipe.runs.worker  # noqa: F401 (importing it makes the decisions that are tested)


def main() -> None:
    folder = Path(sys.argv[1]).parent
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    save = dcp.async_save(  # in a process that torch starts, which has a second process group
        {"w": torch.ones(1)}, checkpoint_id=folder / "saved", async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    save.result()
    mine = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    ours = {mine.pid, *(process.pid for process in mine.children(recursive=True))}
    listening = (socket for socket in psutil.net_connections("tcp") if socket.status == psutil.CONN_LISTEN)
    found = sorted({socket.laddr.ip for socket in listening if socket.pid in ours})
    (folder / f"listens.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
