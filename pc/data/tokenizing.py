"""Tokenises text into shards, in parallel on several processes and machines.

Machines share the work as parts k/n of the same command (in a SLURM array, for example). On one machine,
`concurrent.futures` distributes units over processes, because it detects a process that the kernel has killed;
`docs/data.md` has the comparison. Repeating the command does only the missing units.
"""

import hashlib
import multiprocessing
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pc.data.encoding import Encoder
from pc.data.manifest import SPLITS, TOKENIZER_FOLDER, Manifest, Shard
from pc.data.shards import write_shard
from pc.data.sources import Unit, read_rows
from pc.data.tokenizers import DEFAULT_TOKENIZER, load_tokenizer
from pc.data.tokenizing_plan import TokenizingPlan, finish, finished, make_plan, record_unit
from pc.errors import UserError

QUIET_BELOW = 30 * 10**6  # no progress bar for fewer bytes of text


def tokenize(
    source: str,
    output: str | Path,
    *,
    subset: str | None = None,
    tokenizer: str = DEFAULT_TOKENIZER,
    text_column: str = "text",
    validation_fraction: float = 0.0005,
    shard_megabytes: int = 256,
    processes: int = 1,
    part: tuple[int, int] = (0, 1),
    source_name: str | None = None,
) -> Manifest | None:
    """Create the token shards of `source` in `output`, or continue an interrupted run.

    source, subset: see `sources.find_files`. tokenizer: see `load_tokenizer`. validation_fraction: of the
    documents, chosen by hash. shard_megabytes: text per shard. part (k, n): process part k of n.
    source_name: the source's name in the manifest. Returns the manifest once all parts are done, else None.
    """
    output = Path(output)
    plan = make_plan(
        source,
        subset,
        source_name,
        load_tokenizer(tokenizer),
        text_column,
        validation_fraction,
        shard_megabytes,
        output,
    )
    k, n = part
    unfinished = [unit for unit in plan.units[k::n] if finished(output, plan, unit) is None]
    if unfinished:
        _require_space(output, unfinished, plan)
        _run(output, plan, unfinished, min(processes, len(unfinished)))
    return finish(output, plan)


def _require_space(output: Path, unfinished: Sequence[Unit], plan: TokenizingPlan) -> None:
    # English text has about 4.3 bytes per token. This assumes 4, so uint16 tokens need half a byte per byte of text.
    needed = sum(unit.text_bytes for unit in unfinished) * np.dtype(plan.dtype).itemsize // 4
    free = shutil.disk_usage(output).free
    if free < needed:
        raise UserError(f"{output} needs about {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free")


def _run(output: Path, plan: TokenizingPlan, unfinished: list[Unit], processes: int) -> None:
    total = sum(unit.text_bytes for unit in unfinished)
    interval = 1 if sys.stderr.isatty() else 60  # seconds; fewer lines in a log file
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"tokenising ({processes} processes)",
        mininterval=interval,
        disable=total < QUIET_BELOW,
    ) as bar:
        if processes == 1:
            encoder = Encoder(load_tokenizer(_reference(output, plan)))
            for unit in unfinished:
                for done in tokenize_unit(output, plan, unit, encoder):
                    bar.update(done)
        else:
            _run_in_pool(output, plan, unfinished, processes, bar)


def _run_in_pool(output: Path, plan: TokenizingPlan, unfinished: list[Unit], processes: int, bar: tqdm) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # import once, not in every process
    progress = context.Value("q", 0)  # text bytes done by all processes
    # The first failure cancels units that have not started.
    with ProcessPoolExecutor(processes, context, _start_worker, (output, plan, progress)) as pool:
        pending = {pool.submit(_work, unit) for unit in unfinished}
        try:
            while pending:
                finished, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                bar.update(progress.value - bar.n)
                for future in finished:
                    future.result()
            bar.update(bar.total - bar.n)  # the rest, because text bytes per batch are rounded down
        except BrokenProcessPool as error:
            raise UserError(
                "a tokenising process was killed, probably because memory ran out: use fewer "
                "--processes or a smaller --shard-megabytes, and repeat the command"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: dict = {}  # state of a pool process between units


def _start_worker(output: Path, plan: TokenizingPlan, progress) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C
    _worker.update(
        output=output, plan=plan, progress=progress, encoder=Encoder(load_tokenizer(_reference(output, plan)))
    )


def _work(unit: Unit) -> None:
    for done in tokenize_unit(_worker["output"], _worker["plan"], unit, _worker["encoder"]):
        with _worker["progress"].get_lock():
            _worker["progress"].value += done


def _reference(output: Path, plan: TokenizingPlan) -> str:
    return plan.tokenizer.name if plan.tokenizer.kind == "tiktoken" else str(output / TOKENIZER_FOLDER)


def tokenize_unit(output: Path, plan: TokenizingPlan, unit: Unit, encoder: Encoder) -> Iterator[int]:
    """Tokenise one unit; yields the number of text bytes done since the last yield."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {split: [] for split in SPLITS}
    for rows in read_rows(unit, plan.configuration["text_column"]):
        for split, texts in split_by_hash(rows, plan.configuration["validation_fraction"]).items():
            if texts:
                parts[split].append(encoder.documents(texts, plan.dtype))
        yield len(rows) * unit.text_bytes // max(1, unit.rows)
    shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    for split, encoded in parts.items():
        if encoded:
            tokens, lengths = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
            shards[split].append(write_shard(output, split, unit.number, tokens, lengths))
    record_unit(output, plan, unit, shards)


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
