"""Speed of the data path, each figure with its reference from the same run; JSON on stdout or to --output.

    python benchmarks/data.py tokenising --input 'parquet/*.parquet' --processes 2
    python benchmarks/data.py loader --data data/demo --seq-len 8192

tokenising  the whole command (parquet to verified shards) against `datasets.map` with the same SentencePiece
            model and as many processes; CPU time with one process only
loader      batches from the loader against reading the same spans from a plain `numpy.memmap`
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pc.common.files import write_atomically
from pc.data import Manifest, build_dataloader, load_tokenizer
from pc.data.sources import find_files, open_parquet
from pc.data.tokenizing import tokenize
from pc.errors import exit_on_user_error


def timed(function: Callable[[], object]) -> dict[str, float]:
    """Wall time, and CPU time of this process; worker processes of a pool are not included."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def read_texts(source: str) -> list[str]:
    texts: list[str] = []
    for file in find_files(source):
        with open_parquet(file) as parquet:
            texts += parquet.read(columns=["text"]).column(0).to_pylist()
    return texts


# --- tokenising ------------------------------------------------------------------------------------------

METHODS = ("shards", "datasets.map")


def run_method(method: str, source: str, processes: int) -> dict[str, float]:
    """One measurement, in a separate process."""
    with tempfile.TemporaryDirectory() as temporary:
        options = {"input": source, "processes": processes, "method": method, "folder": temporary}
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, __file__, "one", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def datasets_map(source: str, processes: int, folder: Path) -> dict[str, float]:
    """Times only the `map` call, not reading parquet into Arrow before it, which favours `map`."""
    import datasets

    datasets.disable_progress_bars()
    data = datasets.load_dataset("parquet", data_files=find_files(source), split="train", cache_dir=str(folder))

    def encode(batch: dict, state: dict = {}) -> dict:  # noqa: B006  one tokenizer per process
        if not state:
            state["tokenizer"] = load_tokenizer("mistral-common")
        return {"ids": [np.array([1, *ids, 2], np.uint16) for ids in state["tokenizer"].encode_batch(batch["text"])]}

    return timed(
        lambda: data.map(
            encode,
            batched=True,
            batch_size=1000,
            num_proc=processes if processes > 1 else None,
            remove_columns=data.column_names,
            load_from_cache_file=False,
        )
    )


def benchmark_tokenising(source: str, processes: int, repeats: int) -> dict:
    megabytes = sum(len(text.encode()) for text in read_texts(source)) / 1e6
    runs: dict[str, list[dict]] = {method: [] for method in METHODS}
    for _ in range(repeats):  # interleaved, so that a slow phase of the machine affects all methods
        for method in METHODS:
            runs[method].append(run_method(method, source, processes))
    measured = ["wall_seconds"] + ["cpu_seconds"] * (processes == 1)
    rates = {
        method: {f"megabytes_per_{key}"[:-1]: megabytes / statistics.median(r[key] for r in found) for key in measured}
        for method, found in runs.items()
    }
    ours, base = (rates[method] for method in METHODS)
    return {
        "text_megabytes": megabytes,
        "processes": processes,
        "repeats": repeats,
        "rates": rates,
        "ratio_to_datasets_map": {key: ours[key] / base[key] for key in base},
        "wall_seconds": {method: [r["wall_seconds"] for r in runs[method]] for method in METHODS},
    }


# --- loader ----------------------------------------------------------------------------------------------


def benchmark_loader(folder: str, seq_len: int, batch: int, micro_batches: int, repeats: int) -> dict:
    manifest = Manifest.read(folder)

    def loader(num_workers: int) -> Callable[[], None]:
        built = build_dataloader(
            folder,
            seq_len=seq_len,
            local_batch_size=batch,
            dp_rank=0,
            dp_world_size=1,
            vocab_size=manifest.vocab_size,
            num_workers=num_workers,
            prefetch_factor=4 if num_workers else None,
        )
        iterator = iter(built)
        next(iterator)  # starts the workers

        def read() -> None:
            for _ in range(micro_batches):
                next(iterator)

        return read

    largest = max(manifest.shards["train"], key=lambda shard: shard.tokens)
    tokens = np.load(manifest.folder / largest.tokens_file, mmap_mode="r")
    starts = np.random.default_rng(0).integers(0, len(tokens) - seq_len, size=(micro_batches, batch))

    def memmap_copy() -> None:
        """Copies only the stored bytes."""
        for row in starts:
            for start in row:
                np.array(tokens[start : start + seq_len + 1])

    def memmap_batches() -> None:
        """The batch of a training step in the simplest way: int64 inputs and labels."""
        for row in starts:
            spans = [tokens[start : start + seq_len + 1].astype(np.int64) for start in row]
            torch.from_numpy(np.stack([span[:-1] for span in spans]))
            torch.from_numpy(np.stack([span[1:] for span in spans]))

    methods = {
        "loader": loader(0),
        "loader, 1 worker": loader(1),
        "numpy.memmap, int64 batches": memmap_batches,
        "numpy.memmap, copy only": memmap_copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            seconds[name].append(timed(method)["wall_seconds"])
    total = micro_batches * batch * seq_len
    rates = {name: total / statistics.median(of_method) for name, of_method in seconds.items()}
    # tokens per second of one rank at 1B on 8 H100s: 40 % MFU of 989 TFLOP/s, 7.75 GFLOP per token
    wanted = 0.4 * 989e12 / 7.75e9
    return {
        "seq_len": seq_len,
        "batch": batch,
        "micro_batches": micro_batches,
        "repeats": repeats,
        "tokens_per_second": rates,
        "loader_to_memmap_batches": rates["loader"] / rates["numpy.memmap, int64 batches"],
        "loader_to_memmap_copy": rates["loader"] / rates["numpy.memmap, copy only"],
        "share_of_a_1B_step_percent": 100 * wanted / rates["loader"],
    }


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tokenising", "one"):
        command = commands.add_parser(name)
        command.add_argument("--input", required=True)
        command.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
        command.add_argument("--method", choices=METHODS)
        command.add_argument("--folder", type=Path)
    command = commands.add_parser("loader")
    command.add_argument("--data", default="data/demo")
    command.add_argument("--seq-len", type=int, default=8192)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--micro-batches", type=int, default=200)
    for command in commands.choices.values():
        command.add_argument("--repeats", type=int, default=5)
        command.add_argument("--output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "one":
        if options.method == METHODS[1]:
            result = datasets_map(options.input, options.processes, options.folder)
        else:
            result = timed(lambda: tokenize(options.input, options.folder / "shards", processes=options.processes))
        print(json.dumps(result))
        return
    if options.command == "tokenising":
        result = benchmark_tokenising(options.input, options.processes, options.repeats)
    else:
        result = benchmark_loader(options.data, options.seq_len, options.batch, options.micro_batches, options.repeats)
    text = json.dumps(result, indent=1) + "\n"
    if options.output:
        write_atomically(options.output, text)
    print(text, end="")


if __name__ == "__main__":
    main()
