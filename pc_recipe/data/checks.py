"""Compares shards with the manifest: a part in seconds at each start, or every byte."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from pc_recipe.data.manifest import SPLITS, Manifest, TokenShard
from pc_recipe.data.token_files import read_tokens, require_file
from pc_recipe.files.progress import byte_bar

SAMPLE_TOKENS = 4096  # tokens looked at in each shard
SAMPLE_BYTES = 2**28  # of shards whose checksum is computed at a start
READERS = 16  # a shared file system answers slowly, but many at once


def check_sample(manifest: Manifest, split: str) -> str:
    """Check all sizes, a sample of every shard and the checksums of some; returns what was done, in a line.

    Each call draws other samples and shards.

    Raises:
        UserError: names a damaged shard.
    """
    begin, draw = time.perf_counter(), random.SystemRandom()  # not the generator that a run has seeded
    shards = draw.sample(manifest.shards[split], len(manifest.shards[split]))
    fitting = sum(size <= SAMPLE_BYTES for size in accumulate(shard.tokens_bytes for shard in shards))
    drawn = set(shards[: max(1, fitting)])

    def look_at(shard: TokenShard) -> None:
        require_file(manifest.folder, shard, checksum=shard in drawn)
        count = min(SAMPLE_TOKENS, shard.tokens)
        read_tokens(manifest, shard, draw.randint(0, shard.tokens - count), count)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(look_at, shards))
    return (
        f"{manifest.folder}: of {len(shards):,} {split} shards, all sizes, a sample of each and {len(drawn)} checksums are "
        f"right ({time.perf_counter() - begin:.1f} s; all checksums: scripts/inspect_data.py)"
    )


def verify(manifest: Manifest) -> None:
    """Verify all checksums, reading every byte.

    Raises:
        UserError: names a damaged shard.
    """
    shards = [shard for split in SPLITS for shard in manifest.shards[split]]
    size = sum(shard.tokens_bytes for shard in shards)
    with byte_bar(size, "verifying") as bar, ThreadPoolExecutor(READERS) as pool:
        checks = pool.map(lambda shard: require_file(manifest.folder, shard, checksum=True), shards)
        for shard, _ in zip(shards, checks, strict=True):
            bar.update(shard.tokens_bytes)
