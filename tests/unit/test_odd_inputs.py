"""Damaged files of every input but the config: sweeps, data, tokenizers, checkpoints, exports.

Each is read as it should not be, or refused by a `UserError` of one or two lines that names it; nothing else is raised,
and nothing is left behind.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from helpers.made_runs import make_run, make_shards
from pc import PCConfig
from pc.errors import UserError
from pc_recipe.data.inspection import verify
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizers import _mistral_model, load_tokenizer
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
    """Good inputs by kind: folders, read only."""
    folder = tmp_path_factory.mktemp("made")
    run = make_run(folder / "run", make_shards(folder / "data"), PCConfig(level=4), flavor="tiny")
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
        vocab_size=manifest.vocab_size,
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
    """What a command says of its input; "" if it takes it. Anything but one or two lines about it begins with "!"."""
    try:
        read()
    except UserError as error:
        fine = str(error).count("\n") <= 1 and str(about) in str(error)
        return str(error) if fine else f"! {error}"
    except Exception as error:
        return f"! {type(error).__name__}: {str(error)[:300]}"
    return ""


def damaged_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder, one by one removed, made a folder, cut, overwritten; then restored."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        name = str(file.relative_to(folder))
        file.unlink()
        yield f"no {name}", file
        file.mkdir()
        yield f"{name} is a folder", file
        file.rmdir()
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
