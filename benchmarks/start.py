"""Continuing a trained model: with PC and its function preserved, with PC and its weights as W, and without PC.

Usage: python benchmarks/start.py [--steps 50] [--output results/.../start.json]

A byte-level Llama of 0.13 M parameters is trained on this project's documentation, merged into plain weights, and
trained further in three ways with the same batches. A toy: it shows the effect of a start on the loss, not which run
ends better.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pc
from pc.common import markdown
from pc.common.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}


def batches(seed: int):
    """[8, 64] bytes of the documentation, endlessly, the same for the same seed."""
    files = sorted((ROOT / "docs").glob("*.md"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - 64, (8, 1), generator=generator)
        yield text[starts + torch.arange(64)]


def train(model: torch.nn.Module, steps: int, seed: int, lr: float) -> list[float]:
    """Losses before each step of AdamW."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95)), []
    for _, tokens in zip(range(steps), batches(seed), strict=False):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="further steps of each way (default: 50)")
    parser.add_argument("--before", type=int, default=300, help="steps before that (default: 300)")
    parser.add_argument("--level", type=int, default=4)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = pc.attach(LlamaForCausalLM(LlamaConfig(vocab_size=256, **WIDTHS)), pc.PCConfig(level=arguments.level))
    before = train(model, arguments.before, seed=0, lr=1e-3)
    plain = pc.merge(model)
    print(f"trained with PC for {arguments.before} steps: loss {before[0]:.4f} -> {before[-1]:.4f}", flush=True)
    ways = {"preserve": {"preserve": True}, "weights as W": {"preserve": False}, "without PC": None}
    losses = {}
    for name, options in ways.items():
        copied = copy.deepcopy(plain)
        if options:
            pc.attach(copied, pc.PCConfig(level=arguments.level), **options)
        losses[name] = train(copied, arguments.steps, seed=1, lr=3e-4)
    steps = [0, 1, 2, 5, *range(10, arguments.steps, 10), arguments.steps - 1]
    rows = [[step, *(f"{values[step]:.4f}" for values in losses.values())] for step in steps]
    print(markdown.table(["step", *losses], rows), end="")
    if arguments.output:
        write_atomically(arguments.output, json.dumps({"before": before, **losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
