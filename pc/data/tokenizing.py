"""Parquet to token shards, one unit of work after another, in as many processes and machines as there are.

The units, their order and every byte of the result follow from the configuration alone, so the work can
be divided and repeated at will: each finished unit leaves `units/NNNNN.json`, written after its shards
were read back and checked, and a repeat does only what is missing. Whoever finds all of them writes the
manifest. Machines share the work as parts k/n of the same command (a SLURM array, say); on one machine
`concurrent.futures` does, because it notices a process that the kernel has killed.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from pc.data.encoding import Encoder
from pc.data.manifest import FORMAT, SPLITS, TOKENIZER_FOLDER, Manifest, Shard, TokenizerRecord
from pc.data.shards import size_complaint, smallest_dtype, write_shard
from pc.data.sources import Unit, find_files, open_parquet, plan_units, read_footers
from pc.data.tokenizers import DEFAULT_TOKENIZER, Tokenizer, load_tokenizer
from pc.errors import UserError, exit_on_user_error
from pc.files import write_atomically

BATCH_ROWS = 1000  # documents tokenised at once
QUIET_BELOW = 30 * 10**6  # bytes of text for which no progress bar is shown


@dataclass(frozen=True)
class Plan:
    """All that decides the result. configuration: comparable and hashed. units: the work."""

    configuration: dict
    configuration_sha256: str
    tokenizer: TokenizerRecord
    dtype: str
    validation_fraction: float
    text_column: str
    units: list[Unit]

    @property
    def text_bytes(self) -> int:
        return sum(unit.text_bytes for unit in self.units)


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
    """Make or continue the token shards of `source` in `output`.

    source, subset: see `sources.find_files`. tokenizer: see `load_tokenizer`. validation_fraction: of the
    documents, chosen by hash. shard_megabytes: text per shard. part (k, n): do the k-th of n shares.
    source_name: what the manifest calls the source. Returns the manifest once all parts are done.
    """
    output = Path(output)
    plan = _plan(source, subset, source_name, load_tokenizer(tokenizer), text_column, validation_fraction,
                 shard_megabytes, output)
    k, n = part
    todo = [unit for unit in plan.units[k::n] if _finished(output, plan, unit) is None]
    if todo:
        _require_space(output, todo, plan)
        _run(output, plan, todo, min(processes, len(todo)))
    return _finish(output, plan, source_name or source, subset)


def _plan(
    source: str, subset: str | None, source_name: str | None, tokenizer: Tokenizer, text_column: str,
    validation_fraction: float, shard_megabytes: int, output: Path,
) -> Plan:
    """Read the folder's plan, or look at the source and make one."""
    if not 0 <= validation_fraction < 1:
        raise UserError(f"--validation-fraction {validation_fraction} must be at least 0 and less than 1")
    if shard_megabytes < 1:
        raise UserError(f"--shard-megabytes {shard_megabytes} must be at least 1")
    asked = {
        "format": FORMAT,
        "source": source_name or source,
        "subset": subset,
        "text_column": text_column,
        "tokenizer": tokenizer.sha256,
        "validation_fraction": validation_fraction,
        "shard_megabytes": shard_megabytes,
    }
    path = output / "plan.json"
    if path.is_file():
        saved = json.loads(path.read_text())
        configuration, units = saved["configuration"], [Unit(**unit) for unit in saved["units"]]
        for key, value in asked.items():
            if configuration[key] != value:
                raise UserError(f"{output} was begun with {key} = {configuration[key]!r}, this command has {value!r}: "
                                "choose another --output, or delete the folder")
    else:
        files = read_footers(find_files(source, subset), text_column)
        configuration = asked | {"files": [file.summary() for file in files]}
        units = plan_units(files, shard_megabytes * 10**6)
        for name, content in tokenizer.files.items():
            _write(output / TOKENIZER_FOLDER / name, content)
        _write(path, json.dumps({"configuration": configuration, "units": [asdict(u) for u in units]}, indent=1))
    digest = hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
    return Plan(configuration, digest, TokenizerRecord.of(tokenizer), smallest_dtype(tokenizer.vocab_size),
                validation_fraction, text_column, units)


def _write(path: Path, content: str | bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"could not write {path}: {error.strerror or error}") from error


def _require_space(output: Path, todo: Sequence[Unit], plan: Plan) -> None:
    # English text comes to some 4.3 bytes per token; half a byte per byte leaves a reserve at uint16.
    needed = sum(unit.text_bytes for unit in todo) * np.dtype(plan.dtype).itemsize // 4
    free = shutil.disk_usage(output).free
    if free < needed:
        raise UserError(f"{output} needs about {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free")


def _finished(output: Path, plan: Plan, unit: Unit) -> dict[str, list[Shard]] | None:
    """The unit's shards if it was finished with this configuration and its files are all there."""
    path = output / "units" / f"{unit.number:05d}.json"
    try:
        record = json.loads(path.read_text())
        if record["configuration_sha256"] != plan.configuration_sha256:
            return None
        shards = {split: [Shard(**shard) for shard in record["shards"][split]] for split in SPLITS}
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None
    complaints = [size_complaint(output, shard) for split in SPLITS for shard in shards[split]]
    return None if any(complaints) else shards


def _finish(output: Path, plan: Plan, source: str, subset: str | None) -> Manifest | None:
    """Write the manifest if every unit is done."""
    records = [_finished(output, plan, unit) for unit in plan.units]
    if any(record is None for record in records):
        return None
    manifest = Manifest(
        folder=output,
        dtype=plan.dtype,
        source={"input": source, "subset": subset, "files": plan.configuration["files"],
                "text_column": plan.text_column},
        split_rule=f"validation if blake2b-64(text) / 2^64 < {plan.validation_fraction}, else train",
        configuration_sha256=plan.configuration_sha256,
        tokenizer=plan.tokenizer,
        shards={split: [shard for record in records for shard in record[split]] for split in SPLITS},
    )
    manifest.write()
    return manifest


# --- running units ---------------------------------------------------------------------------------------------


def _run(output: Path, plan: Plan, todo: list[Unit], processes: int) -> None:
    total = sum(unit.text_bytes for unit in todo)
    interval = 1 if sys.stderr.isatty() else 60  # seconds; a log file needs fewer lines
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenising ({processes} processes)",
              mininterval=interval, disable=total < QUIET_BELOW) as bar:
        if processes == 1:
            encoder = Encoder(load_tokenizer(_reference(output, plan)))
            for unit in todo:
                for done in tokenize_unit(output, plan, unit, encoder):
                    bar.update(done)
        else:
            _run_in_pool(output, plan, todo, processes, bar)


def _run_in_pool(output: Path, plan: Plan, todo: list[Unit], processes: int, bar: tqdm) -> None:
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)  # text bytes done, over all processes
    # Each process starts with the tokenizer; the first failure cancels what has not begun.
    with ProcessPoolExecutor(processes, context, _start_worker, (output, plan, progress)) as pool:
        pending = {pool.submit(_work, unit) for unit in todo}
        try:
            while pending:
                finished, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                bar.update(progress.value - bar.n)
                for future in finished:
                    future.result()
            bar.update(bar.total - bar.n)  # text bytes per batch were rounded down
        except BrokenProcessPool as error:
            raise UserError("a tokenising process was killed, most likely because memory ran out: use fewer "
                            "--processes or a smaller --shard-megabytes, and repeat the command") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: dict = {}  # what a pool process keeps between units


def _start_worker(output: Path, plan: Plan, progress) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    _worker.update(output=output, plan=plan, progress=progress, encoder=Encoder(load_tokenizer(_reference(output, plan))))


def _work(unit: Unit) -> None:
    for done in tokenize_unit(_worker["output"], _worker["plan"], unit, _worker["encoder"]):
        with _worker["progress"].get_lock():
            _worker["progress"].value += done


def _reference(output: Path, plan: Plan) -> str:
    return plan.tokenizer.name if plan.tokenizer.kind == "tiktoken" else str(output / TOKENIZER_FOLDER)


def tokenize_unit(output: Path, plan: Plan, unit: Unit, encoder: Encoder) -> Iterator[int]:
    """Do one unit; yields text bytes as they are done."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {split: [] for split in SPLITS}
    for rows in _read_rows(unit, plan.text_column):
        for split, texts in split_by_hash(rows, plan.validation_fraction).items():
            if texts:
                parts[split].append(encoder.documents(texts, plan.dtype))
        yield len(rows) * unit.text_bytes // max(1, unit.rows)
    shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    for split, encoded in parts.items():
        if encoded:
            tokens, lengths = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
            shards[split].append(write_shard(output, split, unit.number, tokens, lengths))
    record = {
        "configuration_sha256": plan.configuration_sha256,
        "shards": {split: [asdict(shard) for shard in shards[split]] for split in SPLITS},
    }
    _write(output / "units" / f"{unit.number:05d}.json", json.dumps(record, indent=1))


def _read_rows(unit: Unit, text_column: str) -> Iterator[list[bytes]]:
    """The unit's texts as UTF-8 bytes, some rows at a time; null is an empty text."""
    try:
        with open_parquet(unit.file) as parquet:
            groups = list(range(unit.first_row_group, unit.end_row_group))
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=[text_column], use_threads=False):
                column = batch.column(0)
                binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
                yield [text or b"" for text in column.cast(binary).to_pylist()]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{unit.file} cannot be read to its end: {error}") from error


def split_by_hash(texts: Sequence[bytes], validation_fraction: float) -> dict[str, list[str]]:
    """Divide texts by their own hash: equal texts always fall on the same side, in any file or order.

    Bytes that are no UTF-8 become U+FFFD.
    """
    bound = int(validation_fraction * 2**64)
    result: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        digest = hashlib.blake2b(text, digest_size=8).digest()
        split = "validation" if int.from_bytes(digest, "big") < bound else "train"
        result[split].append(text.decode("utf-8", errors="replace"))
    return result


# --- the command -------------------------------------------------------------------------------------------


def _default_part() -> str:
    """This process's share: that of the SLURM array task it is, or all."""
    number = int(os.environ.get("SLURM_ARRAY_TASK_ID", 0)) - int(os.environ.get("SLURM_ARRAY_TASK_MIN", 0))
    return f"{number}/{os.environ.get('SLURM_ARRAY_TASK_COUNT', 1)}"


def _parse_part(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not int(numbers[1]) < int(numbers[2]):
        raise UserError(f"--part {text} must be K/N with K from 0 to N - 1")
    return int(numbers[1]), int(numbers[2])


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenise parquet files with a text column into training shards.")
    parser.add_argument("--input", required=True, help="parquet file, folder, glob pattern or Hub dataset owner/name")
    parser.add_argument("--subset", help="named subset of a Hub dataset, such as sample-10BT or CC-MAIN-2023-50")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--tokenizer", default=DEFAULT_TOKENIZER,
                        help="folder with tokenizer.json, SentencePiece .model file, tiktoken encoding, or "
                             "%(default)s (default; 32,000 entries)")
    parser.add_argument("--text-column", default="text", help="(default: %(default)s)")
    parser.add_argument("--validation-fraction", type=float, default=0.0005,
                        help="share of the documents, chosen by the hash of their text (default: %(default)s)")
    parser.add_argument("--shard-megabytes", type=int, default=256, help="text per shard (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)),
                        help="(default: one per core, here %(default)s)")
    parser.add_argument("--part", default=_default_part(),
                        help="K/N: do share K = 0 … N-1 of the work (default: this SLURM array task's, else all)")
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        manifest = tokenize(
            options.input,
            options.output,
            subset=options.subset,
            tokenizer=options.tokenizer,
            text_column=options.text_column,
            validation_fraction=options.validation_fraction,
            shard_megabytes=options.shard_megabytes,
            processes=options.processes,
            part=_parse_part(options.part),
        )
    except KeyboardInterrupt:
        print("\nStopped. The same command continues with the shards that are missing.", file=sys.stderr)
        sys.exit(130)
    minutes = (time.perf_counter() - start) / 60
    if manifest is None:
        print(f"Part {options.part} is done after {minutes:.1f} minutes; {options.output} is complete when all are.")
        return
    print(f"{options.output} is complete ({minutes:.1f} minutes):")
    for split in SPLITS:
        print(f"  {split:10}  {manifest.documents(split):>12,} documents  {manifest.tokens(split):>15,} tokens")
    print(f"Look into it with: python scripts/inspect_data.py {options.output}")
