"""Run a function on several gloo processes and collect the results."""

import faulthandler
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from queue import Empty

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

# One server process imports torch and TorchTitan once; every rank is forked from it in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "pc_recipe.runs.worker", "helpers.tiny"]
)


def run_ranks(world_size: int, function, *args, timeout: float = 240.0) -> list:
    """`function(rank, *args)` on each rank, with the default process group up; results in order of rank.

    `function` is defined at module level. Arguments and results must pickle.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = _context.Queue()
        processes = [
            _context.Process(target=_main, args=(rank, world_size, f"{folder}/store", queue, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results = {}
        try:
            for _ in range(world_size):
                rank, result, error = _next(queue, processes, timeout)
                if error is not None:
                    time.sleep(0.5)  # by now a rank whose end caused the error shows its status
                    ended = {r: p.exitcode for r, p in enumerate(processes) if p.exitcode}
                    raise AssertionError(f"rank {rank} failed (status of ranks that were killed: {ended}):\n{error}")
                # trusted bytes, just written by the process above
                results[rank] = torch.load(io.BytesIO(result), weights_only=False)
        except AssertionError as error:
            for path in sorted(Path(folder).glob("*.crash")):
                error.add_note(path.read_text())
            raise
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
        return [results[rank] for rank in range(world_size)]


def sharded(mesh, tensors) -> list[nn.Parameter]:
    """Tensor parallelism by `distribute_tensor`, over rows and columns in turn, then FSDP2."""
    if "tp" in mesh.mesh_dim_names:
        tensors = [distribute_tensor(t, mesh["tp"], [Shard(i % 2)], src_data_rank=None) for i, t in enumerate(tensors)]
    model = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
    fully_shard(model, mesh=mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")])
    return list(model)


def unsharded(tensors) -> list[nn.Parameter]:
    """The same tensors as parameters of one process."""
    return [nn.Parameter(tensor) for tensor in tensors]


def _next(queue, processes, timeout: float):
    """The next result of a rank. As under torchrun, a rank that was killed ends the others too."""
    deadline = time.monotonic() + timeout
    while True:
        killed = [process.exitcode for process in processes if process.exitcode]
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if killed or time.monotonic() > deadline:
                raise AssertionError(
                    f"ranks ended with status {killed}" if killed else f"no answer in {timeout} s"
                ) from None


def _main(rank, world_size, store, queue, function, args) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    result, error = None, None
    crash = open(f"{store}.{rank}.crash", "w")  # gets the stack of each thread if torch crashes
    faulthandler.enable(crash)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
        # As bytes: a tensor in the queue would be in shared memory, which is freed when its process ends.
        buffer = io.BytesIO()
        torch.save(function(rank, *args), buffer)
        result = buffer.getvalue()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    queue.put((rank, result, error))
    queue.close()
    queue.join_thread()
