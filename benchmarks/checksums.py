"""Cost of a checkpoint's checksums: `python benchmarks/checksums.py --gib 2 FOLDER`, one process, one rank's share.

Writes tensors alternately with torch's writer and with the checksummed one, then compares the checksums. That reads the
file from the page cache, so its time is that of hashing. Prints the fastest time of each and the CPU time, which is
more reliable on a busy machine.
"""

import argparse
import shutil
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash

from pc.titan.checksums import ChecksummedWriter
from pc.titan.distcp import CheckpointFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for checkpoints; a subfolder is created and removed")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint (default 1)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    folder = arguments.folder / "checksums-benchmark"
    count = max(1, round(arguments.gib * 2**30 / (4 * 2**24)))
    state = {f"w{i}": torch.randn(4096, 4096) for i in range(count)}  # 64 MiB each
    gib = count * 2**26 / 2**30
    names = ("torch's writer", "with checksums", "hashing alone", "comparing")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name, writer in (("torch's writer", dcp.FileSystemWriter), ("with checksums", ChecksummedWriter)):
            shutil.rmtree(folder, ignore_errors=True)
            seconds[name].append(_time(lambda: dcp.save(state, storage_writer=writer(folder), no_dist=True)))
        checkpoint = CheckpointFolder(folder)
        seconds["comparing"].append(_time(checkpoint.verify))
        hasher = xxhash.xxh3_128()
        seconds["hashing alone"].append(_time(lambda: [hasher.update(t.numpy()) for t in state.values()]))
    shutil.rmtree(folder)
    for name, times in seconds.items():
        wall, cpu = (min(values) for values in zip(*times, strict=True))
        print(f"{name:<16} {wall / gib:6.2f} s per GiB, {cpu / gib:.2f} s of CPU time")


def _time(function) -> tuple[float, float]:
    """Seconds of wall clock and of CPU time."""
    start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start[0], time.process_time() - start[1]


if __name__ == "__main__":
    main()
