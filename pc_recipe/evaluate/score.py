"""Score models on the nine tasks and save the results, one JSON file per model.

A task is scored once: a repeated command, after a crash or with one more model, reads finished tasks from the file if
model, data, limit and versions are the same.
"""

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from pc.errors import UserError
from pc_recipe.evaluate import hugging_face, tables, tasks
from pc_recipe.evaluate.log_likelihoods import LogLikelihoods
from pc_recipe.files import look, record
from pc_recipe.files.atomic import sha256_of, write_atomically
from pc_recipe.files.inside import require_plain
from pc_recipe.files.run_folder import CHECKSUMS, INDEX, parse_model
from pc_recipe.train.environment import read_commit

_OF_A_MODEL = (".safetensors", ".json", ".distcp", ".model", ".txt")  # endings: weights, settings, tokenizers
_VERSIONED = ("lm_eval", "transformers", "tokenizers", "datasets", "torch")


_OfItems = Annotated[str, Field(pattern="^[01]*$")]


class _TaskScores(TypedDict):
    """`tasks.score`, and what it was scored on."""

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    data: str
    items: int
    variant: NotRequired[str]
    acc: NotRequired[float]
    acc_norm: NotRequired[float]
    acc_stderr: NotRequired[float | None]
    acc_norm_stderr: NotRequired[float | None]
    acc_of_items: NotRequired[_OfItems]
    acc_norm_of_items: NotRequired[_OfItems]


class _Scores(TypedDict):
    """A file of results."""

    name: str
    model: str
    model_sha256: str
    limit: int | None
    versions: dict[str, str]
    tasks: dict[str, _TaskScores]


def score(
    models: Sequence[str],
    *,
    output: str | Path,
    names: Sequence[str] = tasks.PAPERS,
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> list[Path]:
    """Score every model on every task, and write the tables and the plot; returns the files of results, and the table.

    Args:
        models: `PATH` or `NAME=PATH` each.
        data: folder of JSON lines; None loads the sets from the Hub.
        limit: score only this many items of each task, marked as partial.
        batch_size: sequences per forward pass.
    """
    names = list(dict.fromkeys(names))
    tasks.require_known(names)
    require_plain(Path(output))
    sets = {task: sha256_of(tasks.data_file(task, data)) if data else tasks.hub_set(task) for task in names}
    suffix = f".limit-{limit}" if limit else ""
    files = {}
    for name, path in map(parse_model, models):
        slug = re.sub(r"[^\w.+-]+", "-", name).strip("-")
        file = Path(output) / f"{slug}{suffix}.json"
        if file in files:
            raise UserError(f"two models are called {slug!r}; give names: NAME=PATH")
        require_plain(path)
        files[file] = name, path
        record.read(file, _Scores)  # raises before anything is scored
    results = [_score_model(*model, file, sets, data, limit, batch_size) for file, model in files.items()]
    table, *_ = tables.write(results, names, Path(output) / f"table{suffix}")
    return [*files, table]


def _score_model(
    name: str, path: Path, file: Path, sets: dict[str, str], data: str | Path | None, limit: int | None, batch_size: int
) -> dict[str, Any]:
    """Score the tasks that `file` does not have yet; returns all that it has then. sets: {task: hash of its data}."""
    versions = {package: importlib.metadata.version(package) for package in _VERSIONED}
    conditions = {"model_sha256": _sha256_of_model(path), "limit": limit, "versions": versions}
    saved = record.read(file, _Scores)
    scored = saved["tasks"] if saved and saved | conditions == saved else {}
    missing = [task for task in sets if not _has_score(scored.get(task, {}), task, sets[task])]
    results = {"name": name, "model": str(path)} | conditions | {"tasks": scored}
    if len(missing) < len(sets):
        _print_progress(f"{name}: {len(sets) - len(missing)} of {len(sets)} tasks are already scored")
    lm = _load(path, batch_size) if missing else None
    write_atomically(file, json.dumps(results, indent=2) + "\n")  # fails now if the folder is not writable
    for number, task in enumerate(missing, start=1):
        _print_progress(f"{name}: {task} ({number} of {len(missing)})")
        scored[task] = tasks.score(lm, tasks.load(task, data), limit) | {
            "data": sets[task],
            "variant": tasks.variant_of(task, data),
            "commit": read_commit(),
            "batch_size": batch_size,
        }
        write_atomically(file, json.dumps(results, indent=2) + "\n")
    return results


def _has_score(scores: dict[str, Any], task: str, data: str) -> bool:
    return scores.get("data") == data and {tasks.METRICS[task], f"{tasks.METRICS[task]}_stderr"} <= scores.keys()


def _load(path: Path, batch_size: int) -> LogLikelihoods:
    model, tokenizer = hugging_face.load(path)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]  # its wrapper hides the argument
    return LogLikelihoods(model, tokenizer, batch_size)


def _sha256_of_model(path: Path) -> str:
    """One hash over everything that affects a model's scores; of a checkpoint, over its checksums if it has any."""
    names = look.names(path)
    if CHECKSUMS in names:
        names = [CHECKSUMS]
    parts = [name for name in names if name in (CHECKSUMS, INDEX) or name.endswith(_OF_A_MODEL)]
    return hashlib.sha256("".join(f"{name} {sha256_of(path / name)}\n" for name in parts).encode()).hexdigest()


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
