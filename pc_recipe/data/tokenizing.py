"""Tokenises text into shards, in parallel on several processes and machines.

Machines share the work as parts k/n of the same command (in a SLURM array, for example). On one machine,
`concurrent.futures` distributes units over processes, because it detects a process that the kernel has killed.
Repeating the command does only the missing units.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from pc.errors import UserError
from pc_recipe.data.fast_encoding import DIFFERS, FASTOKENS, FastEncoder, OtherIds, load_library
from pc_recipe.data.manifest import SPLITS, TOKENIZER_FOLDER, Manifest, TokenShard
from pc_recipe.data.sources import BATCH, Unit, read_texts
from pc_recipe.data.token_files import write_shard
from pc_recipe.data.tokenizers import DEFAULT_TOKENIZER, Tokenizer, load_tokenizer
from pc_recipe.data.tokenizing_job import (
    TokenizingJob,
    UnitRecord,
    open_job,
    read_finished,
    record_unit,
    write_manifest_if_finished,
)
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.own_code import own_code
from pc_recipe.files.progress import byte_bar

Documents = Callable[[Sequence[str]], np.ndarray]
LARGEST_SHARD = 2
"""A shard is cut at this many times --shard-megabytes of text. So a unit of work that holds more, such as one huge file,
becomes several shards, which bounds the memory of a process."""


def tokenize(
    sources: str | Sequence[str],
    output: str | Path,
    *,
    subset: str | None = None,
    tokenizer: str = DEFAULT_TOKENIZER,
    text_key: str = "text",
    validation_fraction: float | None = None,
    shard_megabytes: int = 256,
    max_documents: int | None = None,
    processes: int = 1,
    part: tuple[int, int] = (0, 1),
    engine: str = "tokenizers",
) -> Manifest | None:
    """Create the token shards of `sources` in `output`, or continue an interrupted run.

    Args:
        sources, subset: see `sources.find_files`.
        text_key: column of parquet and CSV, key of JSON lines.
        tokenizer: see `load_tokenizer`.
        validation_fraction: share of the documents, chosen by hash; None: `validation_share`.
        shard_megabytes: text per shard.
        max_documents: only this many, the first of the first file.
        part: (k, n) processes part k of n.
        engine: "tokenizers", or "fastokens" as long as it gives the same ids (`fast_encoding`).

    Returns:
        The manifest once all parts are done, else None.
    """
    settings = {
        "subset": subset,
        "text_key": text_key,
        "validation_fraction": validation_fraction,
        "shard_megabytes": shard_megabytes,
        "max_documents": max_documents,
    }
    if engine == FASTOKENS:
        load_library()
    sources = [sources] if isinstance(sources, str) else list(sources)
    job = open_job(Path(output), sources, load_tokenizer(tokenizer), settings)
    k, n = part
    unfinished = [unit for unit in job.units[k::n] if read_finished(job, unit) is None]
    if engine == FASTOKENS and unfinished:
        job = replace(job, fast=_is_equal_so_far(job, unfinished))
    if processes == 1 or len(unfinished) < 2:
        with byte_bar(sum(unit.text_bytes for unit in unfinished), "tokenising") as bar:
            for unit in unfinished:
                tokenize_unit(job, unit, bar.update)
    else:
        _run_in_pool(job, unfinished, min(processes, len(unfinished)))
    return write_manifest_if_finished(job)


def _run_in_pool(job: TokenizingJob, unfinished: list[Unit], processes: int) -> None:
    context = multiprocessing.get_context("forkserver")
    os.environ.update(own_code())  # for the fork server
    context.set_forkserver_preload([__name__])  # import once, not in every process
    bar = byte_bar(sum(unit.text_bytes for unit in unfinished), f"tokenising ({processes} processes)")
    with bar, ProcessPoolExecutor(processes, context, _start_process) as pool:
        units = {pool.submit(tokenize_unit, job, unit): unit for unit in unfinished}
        try:
            for future in as_completed(units):
                future.result()
                bar.update(units[future].text_bytes)
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()  # their units are not recorded
            raise
        except BrokenProcessPool as error:
            raise UserError(
                "a tokenising process was killed, probably because memory ran out: use fewer "
                "--processes or a smaller --shard-megabytes, and repeat the command"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # the first failure cancels units that have not started


def _start_process() -> None:
    """Begin a process of the pool, which ends when the command does, by whatever signal.

    By itself it would wait for units for ever: each process of the pool, and the fork server, holds the pipes of all open.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C
    command = multiprocessing.parent_process()
    assert command is not None

    def follow() -> None:
        command.join()
        os._exit(1)  # the unit is not recorded

    threading.Thread(target=follow, daemon=True).start()


def _is_equal_so_far(job: TokenizingJob, units: list[Unit]) -> bool:
    """Whether fastokens gives the ids of `tokenizers` for what is compared before the first unit."""
    try:
        texts = (text for unit in units for text in read_texts(unit, job.settings["text_key"], Counter(), Counter()))
        FastEncoder(_load_once(job.output / TOKENIZER_FOLDER, job.tokenizer.sha256)).check(texts)
    except OtherIds as error:
        _give_up(job, error)
    return not look.is_there(job.output / DIFFERS)


def _give_up(job: TokenizingJob, error: OtherIds) -> None:
    write_atomically(job.output / DIFFERS, f"{error}\n")
    print(f"{error}: tokenizers encodes this unit and the rest of the job", file=sys.stderr)


def tokenize_unit(job: TokenizingJob, unit: Unit, advance: Callable[[int], object] = lambda characters: None) -> None:
    """Write the unit's shards and its record; `advance` is called with the number of characters of each batch."""
    tokenizer = _load_once(job.output / TOKENIZER_FOLDER, job.tokenizer.sha256)
    if job.fast and not look.is_there(job.output / DIFFERS):
        fast = _load_fast_once(tokenizer)
        fast.start_unit()
        try:
            return _tokenize_unit(job, unit, advance, partial(tokenizer.documents, encode=fast.encode_batch))
        except OtherIds as error:
            _give_up(job, error)
    _tokenize_unit(job, unit, advance, tokenizer.documents)


def _tokenize_unit(job: TokenizingJob, unit: Unit, advance: Callable[[int], object], documents: Documents) -> None:
    settings, replaced, left_out = job.settings, Counter[str](), Counter[str]()
    texts = islice(read_texts(unit, settings["text_key"], replaced, left_out), settings["max_documents"])
    shards: dict[str, list[TokenShard]] = {split: [] for split in SPLITS}
    for number in count():
        encoded = _encode(texts, documents, settings, advance)
        if not any(encoded.values()):
            break
        name = f"{unit.number:05d}-{number}" if number else f"{unit.number:05d}"
        for split, batches in encoded.items():
            if batches:
                tokens = np.concatenate(batches)
                ends = int(np.count_nonzero(tokens == job.tokenizer.eos_id))
                shards[split].append(write_shard(job.output, split, name, tokens, ends))
    job.require_unmodified(unit.groups)
    record_unit(job, unit, UnitRecord(job.sha256, shards, dict(replaced), dict(left_out)))


@lru_cache(maxsize=1)
def _load_fast_once(tokenizer: Tokenizer) -> FastEncoder:
    return FastEncoder(tokenizer)


@lru_cache(maxsize=1)  # for all units of a process
def _load_once(folder: Path, sha256: str) -> Tokenizer:
    return load_tokenizer(folder)


def _encode(
    texts: Iterator[str], documents: Documents, settings: dict, advance: Callable[[int], object]
) -> dict[str, list[np.ndarray]]:
    """Tokens of the next texts, enough for a shard: {split: one array [total] per batch}; no arrays after the last text."""
    encoded: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    characters = 0
    while characters < LARGEST_SHARD * settings["shard_megabytes"] * 10**6:
        if not (batch := list(islice(texts, BATCH))):
            break
        for split, some in split_by_hash(batch, settings["validation_share"]).items():
            if some:
                encoded[split].append(documents(some))
        characters += sum(map(len, batch))
        advance(sum(map(len, batch)))
    return encoded


def split_by_hash(texts: Sequence[str], validation_share: float) -> dict[str, list[str]]:
    """Split texts by their hash, so that equal texts are always in the same split, in any file or order."""
    bound = int(validation_share * 2**64)
    result: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        split = "validation" if int.from_bytes(digest, "big") < bound else "train"
        result[split].append(text)
    return result
