"""Cost of logging and health metrics: the time of each, next to that of a training step.

Usage: python benchmarks/health_cost.py [--flavor debug] [--tokens 2048] [--repeats 7]

One process, one thread, float32. On a GPU this is wall clock with synchronisation, else CPU time, which other work on
the machine does not affect. The share of training time is for the default intervals of [health].
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

import pc
import timing
from pc.titan.health import Health, HealthMetrics
from pc.titan.llama2 import FLAVORS, Llama2
from pc.titan.metrics import JsonLinesLogger, LossSpikes


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after one call to warm up."""
    return statistics.median(timing.interleaved({"": function}, repeats)[""])


def log_a_step() -> Callable[[], object]:
    """The work that `metrics.log_freq = 1` adds to a step on a CPU: TorchTitan's metrics, one line, the spike rule."""
    spikes, steps = LossSpikes(), itertools.count(1)
    logger = JsonLinesLogger(Path(tempfile.mkdtemp()) / "metrics.jsonl", 2048, 1)
    names = [*JsonLinesLogger.NAMES, "grad_norm", "lr"]

    def log() -> None:
        step = next(steps)
        logger.log({**dict.fromkeys(names, 3.0), "loss_spikes": spikes.update(step, 3.0 + 0.01 * (step % 7))}, step)

    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", default="debug", choices=FLAVORS)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per optimizer step, in sequences of 256")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = Llama2(replace(FLAVORS[arguments.flavor], max_seq_len=256))
    model.init_weights()
    model.to(timing.DEVICE)
    pc.attach(model, pc.PCConfig(schedule="step"))
    schedule = pc.StepSchedule(model)
    schedule.materialise()
    config = SimpleNamespace(health=Health(), pc=SimpleNamespace(blocks=["o", "ffn"]))
    health = HealthMetrics(config, [model], schedule, SimpleNamespace(world_size=1, pp=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32_000, (arguments.tokens // 256, 256), device=timing.DEVICE)

    def step() -> None:
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        schedule.pull_back()
        schedule.restore_raw()
        optimizer.step()
        optimizer.zero_grad()
        schedule.materialise()

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    plain_step = seconds(step, arguments.repeats)
    plain = seconds(forward, arguments.repeats)

    def measured_forward() -> None:
        health.start_step(10)
        forward()

    measured = seconds(measured_forward, arguments.repeats)
    # steps after the first 1,000, each with one more group of metrics due
    frequent = seconds(lambda: health.collect(1010), arguments.repeats)
    estimate = seconds(lambda: health.collect(1100), arguments.repeats) - frequent
    spectra = seconds(lambda: health.collect(1500), arguments.repeats) - frequent - estimate
    line = seconds(log_a_step(), 100)
    every_10 = max(measured - plain, 0.0) + frequent
    share = (line + every_10 / 10 + estimate / 100 + spectra / 500) / plain_step
    print(
        f"{arguments.flavor}, {arguments.tokens} tokens per step, one thread, {'GPU' if timing.ON_GPU else 'CPU'} seconds:"
    )
    print(f"  training step                       {plain_step:.4f}")
    print(f"  measuring outputs, every 10 steps   {measured - plain:+.4f}   (forward pass {plain:.4f})")
    print(f"  gamma and norms, every 10 steps     {frequent:.4f}")
    print(f"  spectra, every 500 steps            {spectra:.4f}")
    print(f"  estimate's error, every 100 steps   {estimate:.4f}   ({100 * estimate / plain_step:.2f} % of a step)")
    print(f"  loss to metrics.jsonl, every step   {line:.6f}   ({100 * line / plain_step:.3f} % of a step)")
    print(f"  share of training time at default intervals: {100 * share:.3f} %")


if __name__ == "__main__":
    main()
