"""A plain training loop with PC: accumulation, clipping, autocast, checkpoint and resume.

    python examples/loop.py --steps 20 --folder outputs/loop
    torchrun --nproc-per-node 2 examples/loop.py --steps 20 --folder outputs/loop

Repeat the command to continue from the last checkpoint. The model learns the next token of counting sequences.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pc

VOCABULARY, WIDTH, MICRO_BATCHES = 64, 64, 4


class Block(nn.Module):
    """A feed-forward block; `blocks` selects its layers by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, width]
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def batch(step: int, index: int, rank: int) -> torch.Tensor:
    """[16, 32] tokens that count up by one, the same for the same arguments."""
    generator = torch.Generator().manual_seed(step * 10_000 + index * 100 + rank)
    return (torch.randint(VOCABULARY, (16, 1), generator=generator) + torch.arange(32)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("outputs/loop"))
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1:
        dist.init_process_group()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    ).to(device)
    pc.attach(model, pc.PCConfig(level=4, blocks=("*.up", "*.down")))
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    preconditioner = pc.precondition(trained, optimizer)

    parts = {"model": model, "optimizer": optimizer}  # the whole state: the model's includes W and what belongs to it
    checkpoint, start = arguments.folder / "last.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        start = state.pop("step")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        if rank == 0:
            print(f"step {start} loaded from {checkpoint}", flush=True)

    for step in range(start, arguments.steps):
        total = 0.0
        for index in range(MICRO_BATCHES):
            tokens = batch(step, index, rank).to(device)
            if world > 1:
                trained.require_backward_grad_sync = index == MICRO_BATCHES - 1
            with torch.autocast(device.type, torch.bfloat16):
                logits = trained(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        preconditioner.pull_back()  # the one call that PC adds to a loop, before clipping
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {total:.4f}", flush=True)
    if rank == 0:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "step": max(start, arguments.steps)}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)  # an interruption leaves the old one
        torch.save(pc.merge(model).state_dict(), arguments.folder / "plain.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
