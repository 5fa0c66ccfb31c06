"""160 B tokens in 2,700 shards, as sparse files, with at most 1,024 descriptors; figures in results/2026-11-21-data-path.

pytest --soak -s tests/end_to_end/test_paper_scale.py
"""

import os
import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from helpers.sparse_shards import make_sparse
from pc_recipe.data import token_files
from pc_recipe.data.loader import GlobalOrderLoader

pytestmark = pytest.mark.soak

TRAIN, VALIDATION, TOKENS = 2_666, 34, 60_000_000  # 160 B tokens, and 2 B for validation
RANKS, BATCHES = 8, 300
MODEL = dict(seq_len=8192, local_batch_size=8, dp_world_size=RANKS, vocab_size=32000)


class Rehearsal:
    """Rows of figures: seconds, opens and stats of shards, descriptors and maps held, peak memory."""

    def __init__(self):
        self.seen = []  # threads append to it
        self.rows = {}
        sys.addaudithook(lambda event, given: self.count(event, given[0]) if event == "open" else None)
        real = os.stat
        os.stat = lambda path, *more, **named: self.count("stat", path) or real(path, *more, **named)

    def count(self, event, path):
        if str(path).endswith(".tokens.npy"):
            self.seen.append(event)

    def measure(self, what, act):
        self.seen.clear()
        begin = time.perf_counter()
        result = act()
        self.rows[what] = {
            "seconds": time.perf_counter() - begin,
            "opens": self.seen.count("open"),
            "stats": self.seen.count("stat"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "maps": len(Path("/proc/self/maps").read_text().splitlines()),
            "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        return result


def rehearse(folder, queue):
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    rehearsal = Rehearsal()
    token_files._is_plausible = lambda tokens, vocab_size: True  # the zeros stand for text

    def start(split, rank, **more):
        os.environ["LOCAL_RANK"] = str(rank)
        return GlobalOrderLoader(folder, split, dp_rank=rank, **MODEL, **more)

    def take(loaders):
        iterators = [iter(loader) for loader in loaders]
        for _ in range(BATCHES):
            for iterator in iterators:
                next(iterator)

    rehearsal.measure("start of the first rank", lambda: start("train", 0))
    rehearsal.measure("start of another rank", lambda: start("train", 1))
    loaders = [start("train", rank) for rank in range(RANKS)]
    rehearsal.measure(f"{BATCHES} batches on {RANKS} ranks", lambda: take(loaders))
    at = loaders[0].state_dict() | {"position": int(0.9 * loaders[0].sequences.length)}
    for loader in loaders:
        loader.load_state_dict(at)
    rehearsal.measure(f"{BATCHES} batches after a resume at 90 %", lambda: take(loaders))
    validation = [start("validation", rank, limit_sequences=2560) for rank in range(RANKS)]
    rehearsal.measure("validation, 21 M tokens", lambda: [batch for loader in validation for batch in loader][:0])
    queue.put(rehearsal.rows)


def test_data_of_the_papers_size(tmp_path):
    folder = make_sparse(tmp_path, train=TRAIN, validation=VALIDATION, tokens=TOKENS).folder
    context = get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=rehearse, args=(folder, queue))
    process.start()
    rows = queue.get(timeout=500)
    process.join()
    for what, row in rows.items():
        print(f"| {what} | " + " | ".join(f"{value:,.{int(key == 'seconds')}f}" for key, value in row.items()) + " |")
    assert rows["start of another rank"]["stats"] == rows["start of another rank"]["opens"] == 0
    assert rows["start of the first rank"]["stats"] < 1.1 * TRAIN
    descriptors, maps = ([row[key] for row in rows.values()] for key in ("descriptors", "maps"))
    assert max(descriptors) < min(descriptors) + 8 and max(maps) < min(maps) + 50
