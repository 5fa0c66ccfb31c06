"""Compares shards with the manifest: a part in seconds at each start, or every byte."""

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tqdm import tqdm

from pc_recipe.data.manifest import SPLITS, Manifest, TokenShard
from pc_recipe.data.token_files import is_plausible, read_tokens, require_file
from pc_recipe.files import look
from pc_recipe.files.inside import inside, no_link

SAMPLE_TOKENS = 4096  # tokens looked at in each shard
SAMPLE_BYTES = 2**28  # of shards whose checksum is computed at a start
MOST_DOUBTFUL = 4
READERS = 16  # a shared file system answers slowly, but many at once
RECORD = ".verified"


def check_sample(manifest: Manifest, split: str) -> str:
    """Check all sizes, a sample of every shard and the checksums of some; returns what was done, in a line.

    Each call draws other samples and shards. A sample of one single token may be text or a hole in the file, so the
    checksums of such shards come first.

    Raises:
        UserError: names a damaged shard.
    """
    begin, shards = time.perf_counter(), manifest.shards[split]
    with ThreadPoolExecutor(READERS) as pool:
        plausible = list(pool.map(lambda shard: _is_plausible(manifest, shard), shards))
    doubtful = [shard for shard, fine in zip(shards, plausible, strict=True) if not fine]
    drawn, size = doubtful[:MOST_DOUBTFUL], 0
    for shard in random.SystemRandom().sample(shards, len(shards)):  # not the generator that a run has seeded
        size += shard.tokens_bytes
        if size > SAMPLE_BYTES and drawn:
            break
        drawn.append(shard)
    for shard in drawn:
        require_file(manifest.folder, shard, checksum=True)
    return (
        f"{manifest.folder}: of {len(shards):,} {split} shards, all sizes, a sample of each and {len(drawn)} checksums are "
        f"right ({time.perf_counter() - begin:.1f} s; all checksums: scripts/inspect_data.py)"
    )


def _is_plausible(manifest: Manifest, shard: TokenShard) -> bool:
    """Whether a sample of the shard, at a random place, has different tokens, all in the vocabulary."""
    require_file(manifest.folder, shard)
    count = min(SAMPLE_TOKENS, shard.tokens)
    tokens = read_tokens(manifest, shard, random.SystemRandom().randint(0, shard.tokens - count), count)
    return is_plausible(tokens, manifest.vocab_size)


def verify(manifest: Manifest) -> None:
    """Verify all checksums on all cores, reading every byte. A repeated call continues one that was interrupted.

    Raises:
        UserError: names a damaged shard.
    """
    record = manifest.folder / RECORD
    shards = {_line(manifest, shard): shard for split in SPLITS for shard in manifest.shards[split]}
    verified: set[str] = set()
    with suppress(OSError):
        verified = set(record.read_text(errors="replace").splitlines())
    bar = tqdm(
        total=sum(shard.tokens_bytes for shard in shards.values()),
        unit="B",
        unit_scale=True,
        desc="verifying",
        delay=1,
        mininterval=1 if sys.stderr.isatty() else 60,  # seconds; fewer lines in a log file
    )
    with bar, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        bar.update(sum(shards[line].tokens_bytes for line in shards.keys() & verified))
        missing = [line for line in shards if line not in verified]
        checks = pool.map(lambda line: require_file(manifest.folder, shards[line], checksum=True), missing)
        for line, _ in zip(missing, checks, strict=True):
            bar.update(shards[line].tokens_bytes)
            # a folder that cannot be written is verified in one go
            with suppress(OSError), open(record, "a", opener=no_link) as file:
                file.write(f"{line}\n")
    with suppress(OSError):
        record.unlink()


def _line(manifest: Manifest, shard: TokenShard) -> str:
    """Of `RECORD`: another line if the file or what it should be has changed."""
    path = inside(manifest.folder, shard.tokens_file)
    changed = path.stat().st_mtime_ns if look.is_file(path) else 0
    return f"{shard.tokens_sha256} {changed} {shard.tokens_file}"
