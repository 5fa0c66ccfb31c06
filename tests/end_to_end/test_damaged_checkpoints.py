"""Forty damaged or foreign checkpoints: a resume, a start, an export and a report each end in one line, or need nothing of
what is damaged. No folder changes."""

import contextlib
import dataclasses
import io
import os
import pickle
import runpy
import shutil
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers import tiny
from helpers.ranks import run_ranks
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.writer import ChecksummedWriter

pytestmark = pytest.mark.soak

SMALL = ["--model.n_layers=1", "--training.global_batch_size=2", "--training.steps=6", "--checkpoint.interval=6"]
WEIGHT, MOMENT = "layers.0.attention.wo.weight", "optimizer.state.norm.weight.exp_avg"
OF_MODEL = {WEIGHT, "train_state.step", "method.fingerprint", "a value in place of a weight", "a name of two lines"}
"""What an export reads too."""
RECORDS = {"status.json", "lock", "lock.ranks", "pending.toml"}
"""What a start that is refused writes."""


def bytes_of(value) -> bytes:
    torch.save(value, data := io.BytesIO())
    return data.getvalue()


class Other:
    """Harmless, but no plain value."""


FORMS = {
    "zeros": lambda data: bytes(len(data)),
    "flipped": lambda data: bytes(byte ^ 0xFF for byte in data[:64]) + data[64:],
    "cut": lambda data: data[: len(data) // 2],
    "an object": lambda data: bytes_of({"x": Other()}),
    "a dictionary": lambda data: bytes_of({"a": 1}),
    "larger": lambda data: bytes_of(torch.ones(99, 99)),
    "complex": lambda data: bytes_of(torch.ones(24, 24, dtype=torch.complex64)),
    "sparse": lambda data: bytes_of(torch.eye(24).to_sparse()),
    "without values": lambda data: bytes_of(torch.ones(24, 24, device="meta")),
}
VALUES = [
    ("train_state.step", "6"), ("train_state.step", -1), ("train_state.step", 5), ("train_state.ntokens_seen", None),
    ("dataloader.position", [1]), ("dataloader.position", 2**62), ("dataloader.identity", "[]"),
    ("dataloader.identity", '{"split": "a\\nb"}'), ("lr_scheduler.adamw.last_epoch", "6"),
    ("optimizer.param_groups.norm.weight.lr", "fast"), ("method.fingerprint", "{"), ("method.fingerprint", "5"),
    ("method.fingerprint", '{"enable": true, "level": 99}'),
]  # fmt: skip
ENTRIES = {
    "a value in place of a tensor": {MOMENT: "x"},
    "a value in place of a weight": {WEIGHT: 5},
    "a tensor in place of a value": {"dataloader.position": torch.ones(())},
    "a moment of another shape": {MOMENT: torch.ones(5)},
    "a moment is missing": {MOMENT: None},
    "a name of two lines": {"a\nerror: b": torch.ones(1)},
}
FOLDERS = {
    "renamed": lambda step: step.rename(step.with_name("step-60")),
    "linked": lambda step: step.with_name("step-60").symlink_to("step-6"),
    "without a file": lambda step: next(step.glob("*.distcp")).unlink(),
}
CASES = (
    [("values", name, value) for name, value in VALUES]
    + [("bytes", name, form) for name in (WEIGHT, MOMENT) for form in FORMS]
    + [("entries", form, None) for form in ENTRIES]
    + [("folder", form, None) for form in FOLDERS]
)


def test_there_are_forty():
    assert len(CASES) == 40


@pytest.fixture(scope="module")
def trained(tiny_shards, tmp_path_factory):
    """Config and folder of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny.write_config(folder / "tiny.toml", tiny_shards, folder / "run")
    assert run_ranks(1, command, "worker", [str(config), *SMALL]) == [(0, "")]
    return config, folder / "run"


def command(rank, name, words):
    """(status, stderr) of the worker or a script, in a fork of a process that has imported the recipe."""
    from pc_recipe.runs import worker

    said, status = io.StringIO(), 0
    tiny.trainer_class()  # does not wait at its end
    with (
        patch.object(sys, "argv", [name, *words]),
        patch.object(os, "_exit", sys.exit),
        patch.object(worker.dist, "destroy_process_group"),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            if name == "worker":
                worker.main()
            else:
                runpy.run_path(str(tiny.ROOT / "scripts" / name), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            status = traceback.format_exc()
    return status, "".join(line for line in said.getvalue().splitlines(True) if line.startswith(("error:", "failed:")))


def damage(step: Path, how: str, name: str, form) -> None:
    if how == "folder":
        FOLDERS[name](step)
    elif how == "bytes":
        _replace_bytes(step, name, FORMS[form])
    else:
        saved = CheckpointFolder(step)
        shapes = saved.shapes()
        state = saved.read_tensors([key for key, shape in shapes.items() if shape is not None])
        state |= {key: saved.read_value(key) for key, shape in shapes.items() if shape is None}
        state |= {name: form} if how == "values" else ENTRIES[name]
        shutil.rmtree(step)
        state = {key: value for key, value in state.items() if (key, value) != (MOMENT, None)}
        dcp.save(state, storage_writer=ChecksummedWriter(step), no_dist=True)


def _replace_bytes(step: Path, name: str, change) -> None:
    """As in a checkpoint without checksums, such as TorchTitan's."""
    (step / "XXH128SUMS").unlink()
    index = pickle.loads((step / ".metadata").read_bytes())
    key, info = next((key, info) for key, info in index.storage_data.items() if key.fqn == name)
    file = step / info.relative_path
    content = file.read_bytes()
    new = change(content[info.offset : info.offset + info.length])
    new += bytes(max(0, info.length - len(new)))
    index.storage_data[key] = dataclasses.replace(info, offset=len(content), length=len(new))
    index.storage_meta.modules = []
    file.write_bytes(content + new)
    (step / ".metadata").write_bytes(pickle.dumps(index))


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in RECORDS]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(("how", "name", "form"), CASES, ids=lambda one: repr(one)[:30])
def test_one_line_and_nothing_changes(trained, tmp_path, how, name, form):
    config, run = trained[0], shutil.copytree(trained[1], tmp_path / "run")
    damage(run / "checkpoint" / "step-6", how, name, form)
    step = max((run / "checkpoint").iterdir())
    before = contents(run)
    of_model = how == "folder" or name in OF_MODEL
    start = [f"--checkpoint.initial_load_path={step}", "--checkpoint.initial_load_model_only=false"]
    commands = {
        "resume": ("worker", [str(config), *SMALL, "--training.steps=8", f"--job.dump_folder={run}"], True),
        "start": (
            "worker",
            [str(config), *SMALL, "--training.steps=8", f"--job.dump_folder={tmp_path}/new", *start],
            True,
        ),
        "export": ("export_hf.py", [str(run), str(tmp_path / "export")], of_model),
        "report": ("report.py", [str(run), f"--output={tmp_path}/report.html"], False),
    }
    wrong = []
    for what, (script, words, must_fail) in commands.items():
        run_it = run_ranks if script == "worker" else lambda _, call, *given: [call(0, *given)]  # imports once
        ((status, said),) = run_it(1, command, script, words)
        fine = status in (1, 2) and said.count("\n") == 1 if must_fail or status else said == ""
        print(what, status, said.strip()[:300])
        if not fine or contents(run) != before:
            wrong.append((what, status, said))
    assert not wrong
    assert not (tmp_path / "new" / "checkpoint").exists() or not list((tmp_path / "new" / "checkpoint").iterdir())
