"""Damaged files of every input but the config: sweeps, data, tokenizers, checkpoints, exports.

Each is either read after all, or refused by a `UserError` of one or two lines that names it; nothing else is raised, and
nothing is left behind.
"""

import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from helpers.made_runs import make_run
from helpers.tiny import make_shards
from pc import PCConfig
from pc.errors import UserError
from pc_recipe.data.inspection import describe, verify
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizers import _mistral_model, load_tokenizer
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.evaluate import hugging_face, plain_weights
from pc_recipe.runs.sweep.spec import load as load_sweep

SWEEP = {
    "description": "x", "configs": ["tiny.toml"], "seeds": [0, 1], "folder": "out",
    "axes": {"optimizer.lr": [1e-3, 2e-3], "pc.level": [1, "polar_express"], "pc.blocks": [["o"], ["ffn"]]},
    "spikes_allowed": 0,
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1, "<s>": 2}, "merges": []},
}  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory, tiny_shards):
    """Folders of good inputs by kind; tests must not change them."""
    folder = tmp_path_factory.mktemp("made")
    run = make_run(folder / "run", make_shards(folder / "data", "mistral-common"), PCConfig(level=4), flavor="tiny")
    for kind in ("sweep", "tokenizer", "model"):
        (folder / kind).mkdir()
    (folder / "sweep" / "tiny.toml").write_text("[training]\nsteps = 5\n")
    (folder / "sweep" / "sweep.toml").write_text(tomli_w.dumps(SWEEP))
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    config = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "model" / "tokenizer.model").write_bytes(_mistral_model().read_bytes())
    export = hugging_face.export(run.checkpoint, folder / "export")
    return {
        "sweep": folder / "sweep", "data": tiny_shards, "tokenizer": folder / "tokenizer", "model": folder / "model",
        "run": folder / "run", "export": export,
    }  # fmt: skip


def _read_data(folder):
    manifest = Manifest.read(folder)
    verify(manifest)
    manifest.load_tokenizer()
    loader = GlobalOrderLoader(
        folder, "train", seed=0, seq_len=16, local_batch_size=2, dp_rank=0, dp_world_size=1,
        vocab_size=manifest.tokenizer.vocab_size,
    )  # fmt: skip
    next(iter(loader))


def _read_run(folder):
    hugging_face.load(folder / "checkpoint" / "step-7")
    plain_weights.load(folder / "checkpoint" / "step-7")


READERS = {
    "sweep": lambda folder: load_sweep(folder / "sweep.toml"),
    "data": _read_data,
    "tokenizer": lambda folder: load_tokenizer(folder).encode("a"),
    "model": lambda folder: load_tokenizer(folder).encode("a"),
    "run": _read_run,
    "export": hugging_face.load,
}


def complaint(read: Callable[[], Any], about: object) -> str:
    """The error of a command about its input, "" if it accepts it. Anything but one or two lines that name `about` begins
    with "!"."""
    try:
        read()
    except UserError as error:
        fine = str(error).count("\n") <= 1 and str(about) in str(error)
        return str(error) if fine else f"! {error}"
    except Exception as error:
        return f"! {type(error).__name__}: {str(error)[:300]}"
    return ""


def damaged_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each file of a folder in turn is removed, replaced by a folder or a socket, cut, overwritten, and then restored."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        name = str(file.relative_to(folder))
        file.unlink()
        yield f"no {name}", file
        file.mkdir()
        yield f"{name} is a folder", file
        file.rmdir()
        os.mknod(file, stat.S_IFSOCK)  # opening it fails, while reading a pipe would wait
        yield f"{name} is a socket", file
        file.unlink()
        contents = {"empty": b"", "split": whole[:-5], "binary": bytes(range(256)) * 4, "no keys": b"[]"}
        for kind, content in contents.items():
            file.write_bytes(content)
            yield f"{name}: {kind}", file
        file.write_bytes(whole)


@pytest.mark.parametrize("kind", [*list(READERS)[:-1], pytest.param("export", marks=pytest.mark.soak)])
def test_each_is_read_or_refused_in_a_line(made, tmp_path, kind):
    folder = shutil.copytree(made[kind], tmp_path / kind)
    before = sorted(tmp_path.rglob("*"))
    READERS[kind](folder)
    said = {
        what: complaint(lambda: READERS[kind](folder), damaged.name if kind == "sweep" else folder)
        for what, damaged in damaged_files(folder)
    }
    wrong = [f"{what} -> {answer}" for what, answer in said.items() if answer.startswith("!")]
    assert not wrong, "\n".join(wrong)
    assert any(said.values()) and sorted(tmp_path.rglob("*")) == before


ODD = (None, -1, math.nan, "x", [])


def odd_contents(content: Any) -> Iterator[tuple[str, Any]]:
    """A JSON value in which one inner value (in lists the first) is replaced by an odd one or removed, for all of them."""
    inner = (
        content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    )
    for key, value in list(inner):
        for odd in ODD:
            changed = content.copy()
            changed[key] = odd
            yield f"{key} = {odd}", changed
        changed = content.copy()
        del changed[key]
        yield f"no {key}", changed
        for where, odd in odd_contents(value):
            changed = content.copy()
            changed[key] = odd
            yield f"{key}.{where}", changed


@pytest.mark.parametrize("name", ["manifest.json", "tokenizing.json", "units/00000.json"])
def test_odd_values_are_read_or_refused_in_a_line(made, tmp_path, name):
    """In a data folder, or in one whose tokenising someone else has begun."""
    (tmp_path / "a.txt").write_text("a" * 100)
    folder, manifest = tmp_path / "out", tmp_path / "out" / "manifest.json"

    def go_on() -> None:
        if name != "manifest.json":
            manifest.unlink(missing_ok=True)
            tokenize(str(tmp_path / "a.txt"), folder, tokenizer=str(made["tokenizer"]))
        describe(Manifest.read(folder))

    tokenize(str(tmp_path / "a.txt"), folder, tokenizer=str(made["tokenizer"]))
    go_on()
    whole = (folder / name).read_text()
    wrong = []
    for where, content in odd_contents(json.loads(whole)):
        (folder / name).write_text(json.dumps(content))
        if (answer := complaint(go_on, tmp_path)).startswith("!"):
            wrong.append(f"{where} -> {answer}")
        (folder / name).write_text(whole)
    assert not wrong, "\n".join(wrong)
