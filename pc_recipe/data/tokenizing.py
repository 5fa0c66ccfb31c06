"""Tokenises text into shards, in parallel on several processes and machines.

Machines share the work as parts k/n of the same command (in a SLURM array, for example). On one machine,
`concurrent.futures` distributes units over processes, because it detects a process that the kernel has killed;
`docs/data.md` has the comparison. Repeating the command does only the missing units.
"""

import hashlib
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pc.errors import UserError
from pc_recipe.data.manifest import SPLITS, TOKENIZER_FOLDER, Manifest, TokenShard
from pc_recipe.data.sources import BATCH, Unit, read_texts
from pc_recipe.data.token_files import write_shard
from pc_recipe.data.tokenizers import DEFAULT_TOKENIZER, load_tokenizer
from pc_recipe.data.tokenizing_job import (
    TokenizingJob,
    open_job,
    read_finished,
    record_unit,
    write_manifest_if_finished,
)

MOST_UNFOLDED = 4
"""A unit of work may hold so many times the text that its size in the file, or --shard-megabytes, suggests: the memory
of a process is made for that."""


def tokenize(
    source: str,
    output: str | Path,
    *,
    subset: str | None = None,
    tokenizer: str = DEFAULT_TOKENIZER,
    text_column: str = "text",
    validation_fraction: float = 0.0005,
    shard_megabytes: int = 256,
    max_documents: int | None = None,
    processes: int = 1,
    part: tuple[int, int] = (0, 1),
) -> Manifest | None:
    """Create the token shards of `source` in `output`, or continue an interrupted run.

    Args:
        source, subset: see `sources.find_files`.
        tokenizer: see `load_tokenizer`.
        validation_fraction: share of the documents, chosen by hash.
        shard_megabytes: text per shard.
        max_documents: only so many, the first of the first file.
        part: (k, n) processes part k of n.

    Returns:
        The manifest once all parts are done, else None.
    """
    settings = {
        "subset": subset,
        "text_column": text_column,
        "validation_fraction": validation_fraction,
        "shard_megabytes": shard_megabytes,
        "max_documents": max_documents,
    }
    job = open_job(Path(output), source, load_tokenizer(tokenizer), settings)
    k, n = part
    unfinished = [unit for unit in job.units[k::n] if read_finished(job, unit) is None]
    if processes == 1 or len(unfinished) < 2:
        for unit in tqdm(unfinished, desc="tokenising", unit="shard", disable=None):
            tokenize_unit(job, unit)
    else:
        _run_in_pool(job, unfinished, min(processes, len(unfinished)))
    return write_manifest_if_finished(job)


def _run_in_pool(job: TokenizingJob, unfinished: list[Unit], processes: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # import once, not in every process
    bar = tqdm(
        total=sum(unit.text_bytes for unit in unfinished),
        unit="B",
        unit_scale=True,
        desc=f"tokenising ({processes} processes)",
        mininterval=1 if sys.stderr.isatty() else 60,  # seconds; fewer lines in a log file
    )
    no_traceback = (signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C
    with bar, ProcessPoolExecutor(processes, context, signal.signal, no_traceback) as pool:
        units = {pool.submit(tokenize_unit, job, unit): unit for unit in unfinished}
        try:
            for future in as_completed(units):
                future.result()
                bar.update(units[future].text_bytes)
        except BrokenProcessPool as error:
            raise UserError(
                "a tokenising process was killed, probably because memory ran out: use fewer "
                "--processes or a smaller --shard-megabytes, and repeat the command"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # the first failure cancels units that have not started


def tokenize_unit(job: TokenizingJob, unit: Unit) -> None:
    """Write the unit's shards and its record.

    Raises:
        UserError: the unit's texts are much longer than their place in the file.
    """
    tokenizer = load_tokenizer(job.output / TOKENIZER_FOLDER)
    encoded: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    size, most = 0, MOST_UNFOLDED * max(unit.text_bytes, job.settings["shard_megabytes"] * 10**6)
    texts = islice(read_texts(unit, job.settings["text_column"]), job.settings["max_documents"])
    while batch := list(islice(texts, BATCH)):
        size += sum(map(len, batch))
        if size > most:
            raise UserError(
                f"{unit.file}: {unit.text_bytes / 1e6:.1f} MB of it unfold to more than {most / 1e6:.0f} MB of text; if they "
                "are meant to, write it without dictionary encoding (use_dictionary=False in pyarrow)"
            )
        for split, some in split_by_hash(batch, job.settings["validation_fraction"]).items():
            encoded[split].append(tokenizer.documents(some))
            documents[split] += len(some)
    shards: dict[str, list[TokenShard]] = {split: [] for split in SPLITS}
    for split, count in documents.items():
        if count:
            tokens = np.concatenate(encoded[split])
            shards[split].append(write_shard(job.output, split, unit.number, tokens, count))
    record_unit(job, unit, shards)


def split_by_hash(texts: Sequence[bytes], validation_fraction: float) -> dict[str, list[str]]:
    """Split texts by their hash, so that equal texts are always in the same split, in any file or order.

    Invalid UTF-8 becomes U+FFFD.
    """
    bound = int(validation_fraction * 2**64)
    result: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        digest = hashlib.blake2b(text, digest_size=8).digest()
        split = "validation" if int.from_bytes(digest, "big") < bound else "train"
        result[split].append(text.decode("utf-8", errors="replace"))
    return result
