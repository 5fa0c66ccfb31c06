"""Fits a small network to another, to try out an example's optimizer: in one process, or with FSDP2 under torchrun."""

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.SiLU(), nn.Linear(64, 8, bias=False))


def fit(make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], steps: int = 50) -> nn.Sequential:
    """The trained network, sharded if there are several processes. Prints the loss."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    model, target = network(0), network(1)
    if dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = make_optimizer(model.parameters())
    for step in range(1, steps + 1):
        batch = torch.randn(256, 16, generator=torch.Generator().manual_seed(step))  # the same on every rank
        loss = nn.functional.mse_loss(model(batch), target(batch).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 1 and int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return model
