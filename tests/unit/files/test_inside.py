"""Links and names in other people's folders: nothing outside the folder is changed or read."""

import json
import os
import shutil
import stat
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pc.errors import UserError
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.hf_folder import find_tensors
from pc_recipe.checkpoints.writer import ChecksummedWriter
from pc_recipe.data.inspection import verify
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.sources import find_files
from pc_recipe.data.token_files import TokenStream
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.files import json_lines
from pc_recipe.files.lock import is_locked, join_lock, lock
from pc_recipe.files.run_log import note_start
from pc_recipe.runs.slurm import submit_job

WRITTEN = [
    "lock", "lock.ranks", "metrics.jsonl", "status.json", "train.log", "checkpoint.damaged",
    "tb", "logs", "slurm", "comm_traces/rank_0", "checkpoint/step-2", ".hidden", "profile_traces/iteration_10/rank0.json",
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "comm_traces").mkdir()
    (tmp_path / "disk" / "step-2").mkdir(parents=True)
    (tmp_path / "target").write_text('{"step": 9}\nlast words')
    return tmp_path / "run"


def state(folder):
    return {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


@pytest.mark.parametrize("begin", [lock, join_lock])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_does_not_begin_where_it_would_write_through_a_link(run, name, begin):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    for target in ("target", "disk", "not there"):
        (run / name).symlink_to(run.parent / target)
        before = state(run.parent)
        is_locked(run)
        with pytest.raises(UserError, match=f"{run / name} is a link that leads out of {run}; move it away"):
            begin(run)
        after = state(run.parent)
        assert after == before
        (run / name).unlink()
    begin(run).close()  # control


@pytest.mark.parametrize("begin", [lock, join_lock])
@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "tb/events", ".hidden"])
def test_a_run_does_not_begin_where_it_would_write_to_a_pipe(run, name, begin):
    (run / "tb").mkdir()
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=f"{run / name} is a pipe or a device, not a file; move it away"):
        begin(run)


@pytest.mark.parametrize("begin", [lock, join_lock])
def test_checkpoints_may_be_on_another_disk(run, begin):
    (run / "checkpoint").rmdir()
    (run / "checkpoint").symlink_to(run.parent / "disk")
    begin(run).close()
    (run.parent / "disk" / "step-2" / "__0_0.distcp").symlink_to(run.parent / "target")
    with pytest.raises(UserError, match="step-2/__0_0.distcp is a link that leads out"):
        begin(run)


@pytest.mark.parametrize("begin", [lock, join_lock])
def test_checkpoints_of_another_run_are_not_used(run, begin):
    """Otherwise this run would delete old checkpoints there."""
    shutil.copytree(run, run.parent / "mine")
    (run.parent / "mine" / "config.toml").write_text("")
    (run / "checkpoint").rmdir()
    (run / "checkpoint").symlink_to(run.parent / "mine" / "checkpoint")
    with pytest.raises(UserError, match=f"a link to the checkpoints of another run, {run.parent / 'mine'}; move it"):
        begin(run)


def test_a_link_within_the_folder_may_stay(run):
    """Such as the link `latest-run` of W&B."""
    (run / "tb" / "wandb" / "run-1").mkdir(parents=True)
    (run / "tb" / "wandb" / "latest-run").symlink_to("run-1")
    lock(run).close()


def test_a_job_does_not_log_through_a_link(run):
    (run / "slurm").mkdir()
    (run / "slurm" / "run-1.log").symlink_to(run.parent / "target")
    with pytest.raises(UserError, match="slurm/run-1.log is a link that leads out"):
        submit_job(run, [], [])


@pytest.mark.parametrize("kind", ["a link", "a pipe or a device"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_folder_of_weights_has_only_files_and_no_link_out_of_it(tmp_path, name, kind):
    """This is checked before anything in it is opened."""
    (tmp_path / "model").mkdir()
    if kind == "a link":
        (tmp_path / "model" / name).symlink_to(tmp_path / "mine")
    else:
        os.mknod(tmp_path / "model" / name, stat.S_IFSOCK)
    with pytest.raises(UserError, match=f"model/{name} is {kind}"):
        find_tensors(tmp_path / "model")


def test_a_link_that_comes_later_is_not_followed_either(run):
    (run / "metrics.jsonl").symlink_to(run.parent / "target")
    before = (run.parent / "target").read_bytes()
    for write in (lambda: note_start(run, 1), lambda: json_lines.cut_torn_end(run / "metrics.jsonl")):
        with pytest.raises((UserError, OSError), match="symbolic links"):
            write()
    assert (run.parent / "target").read_bytes() == before


def test_a_checkpoint_is_not_written_through_a_link(run):
    (run / "checkpoint" / "step-2").mkdir()
    (run / "checkpoint" / "step-2" / "__0_0.distcp").symlink_to(run.parent / "target")
    before = (run.parent / "target").read_bytes()
    with pytest.raises(BaseException, match="symbolic links"):
        dcp.save({"w": torch.ones(3)}, storage_writer=ChecksummedWriter(run / "checkpoint" / "step-2"), no_dist=True)
    assert (run.parent / "target").read_bytes() == before


@pytest.fixture
def in_cache(tmp_path):
    """in_cache(folder): a copy as in Hugging Face's cache, whose files are links to blobs."""

    def move(folder):
        snapshot = tmp_path / "models--a--b" / "snapshots" / "1f0e"
        (snapshot.parents[1] / "blobs").mkdir(parents=True)
        for number, file in enumerate(sorted(file for file in folder.rglob("*") if file.is_file())):
            link = snapshot / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, blob := snapshot.parents[1] / "blobs" / f"{number:08x}")
            link.symlink_to(os.path.relpath(blob, link.parent))
        return snapshot

    return move


def test_a_checkpoint_in_the_cache_of_hugging_face_is_read(tmp_path, in_cache):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert CheckpointFolder(in_cache(tmp_path / "step-2")).read_tensors(["w"])["w"].tolist() == [1, 1, 1]


def test_data_in_the_cache_of_hugging_face_are_read(data, in_cache):
    snapshot = in_cache(data)
    verify(Manifest.read(snapshot))
    folders = (data, snapshot)
    assert np.array_equal(*(TokenStream(Manifest.read(folder), "train").read(0, 9) for folder in folders))


@pytest.mark.parametrize("below", ["", "part"])
def test_documents_in_the_cache_of_hugging_face_are_found(tmp_path, in_cache, below):
    (tmp_path / "text" / "part").mkdir(parents=True)
    (tmp_path / "text" / "part" / "a.txt").write_text("mine")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "secret.txt").write_text("mine too")
    snapshot = in_cache(tmp_path / "text")
    assert find_files([str(snapshot / below)], Counter()) == [str(snapshot / "part" / "a.txt")]
    (snapshot / "part" / "b.txt").symlink_to(tmp_path / "blobs" / "secret.txt")  # of another folder
    with pytest.raises(UserError, match="b.txt', which is a file outside of it"):
        find_files([str(snapshot / below)], Counter())


@pytest.fixture
def data(tmp_path, tiny_shards):
    """A data folder of someone else, and a file of mine that is as long as one of its shards."""
    folder = shutil.copytree(tiny_shards, tmp_path / "shards")
    shutil.copy(folder / "train" / "00000.tokens.npy", tmp_path / "mine.npy")
    return folder


@pytest.mark.parametrize("kind", ["..", "absolute", "a link", "a link of a folder", "no name"])
def test_a_manifest_may_name_only_files_of_its_folder(data, kind):
    mine, file = data.parent / "mine.npy", data / "train" / "00000.tokens.npy"
    names = {"..": "../mine.npy", "absolute": str(mine), "no name": "train/\0"}
    if kind == "a link":
        file.unlink()
        file.symlink_to(mine)
    if kind == "a link of a folder":
        (data / "train").rename(data.parent / "other")
        (data / "train").symlink_to(data.parent / "other")
    content = json.loads((data / "manifest.json").read_text())
    content["splits"]["train"]["shards"][0]["tokens_file"] = names.get(kind, "train/00000.tokens.npy")
    (data / "manifest.json").write_text(json.dumps(content))
    manifest = Manifest.read(data)
    for read in (
        lambda: verify(manifest),
        lambda: TokenStream(manifest, "train").read(0, 9),
    ):
        with pytest.raises(UserError, match=f"{data} names .*, which is a file outside of it"):
            read()


@pytest.mark.parametrize("target, name", [("secret.txt", "b.txt"), ("books", "books")])
def test_a_folder_of_documents_has_no_link_out_of_it(tmp_path, target, name):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("mine")
    (tmp_path / "books").mkdir()
    (tmp_path / "secret.txt").write_text("mine too")
    (tmp_path / "books" / "b.txt").write_text("mine too")
    (tmp_path / "text" / name).symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=f"names '{name}.*', which is a file outside of it"):
        find_files([str(tmp_path / "text")], Counter())


def test_the_card_of_a_folder_is_not_followed(monkeypatch, tmp_path):
    """The card could name any address."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: subset\n  data_files: http://a.example/x\n---\n")
    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    with pytest.raises(UserError, match="owner/name is a local path, but --subset selects part of a Hub dataset"):
        find_files(["owner/name"], Counter(), "subset")


@pytest.mark.parametrize("file", ["data/x.txt", "https://a.example/x.txt"])
def test_the_card_of_a_dataset_may_name_only_files_of_the_hub(monkeypatch, file):
    named = ["hf://datasets/owner/name@1/a.txt", file]
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": named}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)
    with pytest.raises(UserError, match=f"its card names '{file}', which is not on the Hub"):
        find_files(["owner/name"], Counter(), "subset")


def test_tokens_are_not_written_through_a_link(tmp_path):
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="out/train is a link"):
        tokenize(str(tmp_path / "text.txt"), tmp_path / "out", tokenizer="mistral-common")
    assert list((tmp_path / "elsewhere").iterdir()) == []
