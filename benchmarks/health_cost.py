"""What the health metrics cost: CPU time of measuring outputs and of the spectra, beside a training step's.

Usage: python benchmarks/health_cost.py [--flavor debug] [--tokens 2048] [--repeats 7]

One process, one thread, CPU seconds (so that other work on the machine does not count), float32. The share
of training time is that at the default intervals of [health].
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch

import pc
from pc.titan.health import Health, HealthMetrics
from pc.titan.llama2 import FLAVORS, Llama2


def cpu_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median CPU time of a call, after one call to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", default="debug", choices=FLAVORS)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per optimizer step, in sequences of 256")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = Llama2(replace(FLAVORS[arguments.flavor], max_seq_len=256))
    model.init_weights()
    pc.attach(model, pc.PCConfig())
    schedule = pc.StepSchedule(model)
    schedule.materialise()
    config = SimpleNamespace(health=Health(), pc=SimpleNamespace(blocks=["o", "ffn"]))
    health = HealthMetrics(config, [model], schedule, SimpleNamespace(world_size=1, pp=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32_000, (arguments.tokens // 256, 256))

    def pass_through_the_model() -> None:
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    def step() -> None:
        pass_through_the_model()
        schedule.pull_back()
        schedule.restore_raw()
        optimizer.step()
        optimizer.zero_grad()
        schedule.materialise()

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    plain_step = cpu_seconds(step, arguments.repeats)
    plain = cpu_seconds(forward, arguments.repeats)

    def measured_forward() -> None:
        health.start_step(10)
        forward()

    measured = cpu_seconds(measured_forward, arguments.repeats)
    frequent = cpu_seconds(lambda: health.collect(10), arguments.repeats)
    spectra = cpu_seconds(lambda: health.collect(500), arguments.repeats) - frequent
    every_10 = max(measured - plain, 0.0) + frequent
    share = every_10 / (10 * plain_step) + spectra / (500 * plain_step)
    print(f"{arguments.flavor}, {arguments.tokens} tokens per step, one thread, CPU seconds:")
    print(f"  training step                       {plain_step:.4f}")
    print(f"  measuring outputs, every 10 steps   {measured - plain:+.4f}   (forward pass {plain:.4f})")
    print(f"  gamma and norms, every 10 steps     {frequent:.4f}")
    print(f"  spectra, every 500 steps            {spectra:.4f}")
    print(f"  share of training time at default intervals: {100 * share:.3f} %")


if __name__ == "__main__":
    main()
