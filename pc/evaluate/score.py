"""Score models on the nine tasks and save the results, one JSON file per model.

A task is scored once: a repeated command, after a crash or with one more model, reads finished tasks from the file if
model, data, limit and versions are the same.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM

from pc.common.files import sha256_of, write_atomically
from pc.errors import UserError
from pc.evaluate import hugging_face, tables, tasks
from pc.evaluate.long_answers import CutsLongAnswers, Request
from pc.titan.environment import commit

_VERSIONED = ("lm_eval", "transformers", "tokenizers", "datasets", "torch")


class HFModel(CutsLongAnswers, HFLM):
    """lm-eval's model of a Hugging Face folder; of a too long answer the end is scored."""

    def _loglikelihood_tokens(self, requests: list[Request], **kwargs) -> list[tuple[float, bool]]:
        return super()._loglikelihood_tokens(self.cut(requests), **kwargs)


@dataclass(frozen=True)
class Model:
    """A model to score. `name` is its name in the table and, as a file name, of its results."""

    name: str
    path: Path

    @staticmethod
    def parse(text: str) -> "Model":
        """`PATH`, or `NAME=PATH` to choose a name. Names and paths may contain "=": the longest existing path counts."""
        parts = text.split("=")
        splits = [("=".join(parts[:i]), "=".join(parts[i:])) for i in range(len(parts))]
        name, path = next((split for split in splits if os.path.exists(split[1])), ("", ""))
        if not path:
            raise UserError(f"{text}: no such model; expected a checkpoint (RUN/checkpoint/step-N) or an export")
        path = Path(path)
        if not name:
            is_step = path.resolve().parent.name == "checkpoint"
            name = f"{path.resolve().parent.parent.name} {path.name}" if is_step else path.resolve().name
        return Model(name, path)

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.+-]+", "-", self.name).strip("-")


def score(
    models: Sequence[str],
    *,
    output: str | Path,
    names: Sequence[str] = tuple(tasks.METRICS),
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    device: str | None = None,
) -> list[Path]:
    """Score every model on every task, then write the tables and the plot; returns the files of results.

    Args:
        models: `PATH` or `NAME=PATH` each.
        data: folder of JSON lines; None loads the sets from the Hub.
        limit: score only this many items of each task, marked as partial.
        device: None uses a GPU if there is one.
    """
    names = list(dict.fromkeys(names))
    tasks.require_known(names)
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} should be at least 1")
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size} should be at least 1")
    parsed = [Model.parse(text) for text in models]
    slugs = [model.slug for model in parsed]
    for slug in slugs:
        if slugs.count(slug) > 1:
            raise UserError(f"two models are called {slug!r}; give names: NAME=PATH")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    suffix = f".limit-{limit}" if limit else ""
    written = []
    for model in parsed:
        path = Path(output) / f"{model.slug}{suffix}.json"
        _score_model(model, path, names, data, limit, batch_size, device)
        written.append(path)
    results = [json.loads(path.read_text()) for path in written]
    tables.write(results, names, Path(output) / f"table{suffix}")
    return written


def _score_model(
    model: Model,
    path: Path,
    names: list[str],
    data: str | Path | None,
    limit: int | None,
    batch_size: int,
    device: str,
) -> None:
    header = {
        "name": model.name,
        "model": str(model.path),
        "model_sha256": _sha256_of_model(model.path),
        "limit": limit,
        "versions": {package: importlib.metadata.version(package) for package in _VERSIONED},
    }
    kept = json.loads(path.read_text()) if path.is_file() else {}
    if any(kept.get(key) != header[key] for key in ("model_sha256", "limit", "versions")):
        if kept:
            _say(f"{path}: from another model or other versions; all its tasks are scored again")
        kept = {}
    results = header | {"tasks": kept.get("tasks", {})}
    sources = {name: sha256_of(tasks.data_file(name, data)) if data else "hub" for name in names}
    missing = [name for name in names if results["tasks"].get(name, {}).get("data") != sources[name]]
    for name in names:
        if name not in missing:
            _say(f"{model.name}: {name} is already scored")
    if missing:
        loaded, tokenizer = hugging_face.load(model.path)
        write_atomically(path, json.dumps(results, indent=2) + "\n")  # a folder that cannot be written shows now
        lm = HFModel(pretrained=loaded.to(device), tokenizer=tokenizer, batch_size=batch_size, device=device)
    for name in missing:
        _say(f"{model.name}: {name} ({names.index(name) + 1} of {len(names)})")
        results["tasks"][name] = _score_task(lm, name, data, limit) | {
            "data": sources[name],
            "commit": commit(),
            "device": device,
            "batch_size": batch_size,
        }
        write_atomically(path, json.dumps(results, indent=2) + "\n")
    for name in names:
        results["tasks"][name]["variant"] = tasks.variant_of(name, data)
    write_atomically(path, json.dumps(results, indent=2) + "\n")


def _score_task(lm: HFModel, name: str, data: str | Path | None, limit: int | None) -> dict[str, Any]:
    found = lm_eval.evaluate(lm, tasks.load([name], data, limit), limit=limit, log_samples=False)
    items = found["n-samples"][name]
    scored = {"version": found["versions"][name], "items": items["effective"], "items_in_set": items["original"]}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in found["results"][name]:
            scored[metric] = found["results"][name][f"{metric},none"]
            error = found["results"][name][f"{metric}_stderr,none"]
            scored[f"{metric}_stderr"] = error if isinstance(error, float) else None  # one item has no standard error
    return scored


def _sha256_of_model(path: Path) -> str:
    """One hash over everything that affects a model's scores."""
    wanted = ("*.safetensors", "*.json", ".metadata", "*.distcp")
    parts = sorted({file for pattern in wanted for file in path.glob(pattern)})
    return hashlib.sha256("".join(f"{file.name} {sha256_of(file)}\n" for file in parts).encode()).hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
