"""How long a step waits for its micro-batches, by number of worker processes.

    python -m pc_recipe.data.demo
    python benchmarks/loader.py [--data data/demo] [--micro-batches 10] [--steps 10] [--compute 1]

Micro-batches of 4 x 8192 of one of 8 ranks, drawn one at a time while the rank computes, which here sleeps. Milliseconds
of a step, median and range; the first steps, in which workers start and files are first read, are left out.
"""

import argparse
import statistics
import time
from pathlib import Path

from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.files import markdown

WARM_UP = 2
WAYS = [(0, None), (1, 4), (2, 4), (2, 8), (4, 4)]


def waits(loader: GlobalOrderLoader, micro_batches: int, steps: int, compute: float) -> list[float]:
    """Milliseconds in each step."""
    batches, waited = iter(loader), []
    for _ in range(WARM_UP + steps):
        waited.append(0.0)
        for _ in range(micro_batches):
            begin = time.perf_counter()
            next(batches)
            waited[-1] += 1e3 * (time.perf_counter() - begin)
            time.sleep(compute / micro_batches)
    return waited[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/demo"))
    parser.add_argument("--micro-batches", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of a step")
    chosen = parser.parse_args()
    rows = []
    for workers, prefetch in WAYS:
        loader = GlobalOrderLoader(
            chosen.data, seq_len=8192, local_batch_size=4, dp_rank=0, dp_world_size=8, vocab_size=2**31,
            num_workers=workers, prefetch_factor=prefetch,
        )  # fmt: skip
        found = waits(loader, chosen.micro_batches, chosen.steps, chosen.compute)
        rows.append([workers, prefetch or "", f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"])
    print(markdown.table(["num_workers", "prefetch_factor", "ms of a step"], rows), end="")


if __name__ == "__main__":
    main()
