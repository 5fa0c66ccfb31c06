"""What a run begins with, and what refuses it: with a checkpoint that is a table of its values, and no model."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import call, create_autospec

import pytest
import torch

from helpers.made_runs import make_earlier
from pc.errors import UserError
from pc.preconditioner import Preconditioner
from pc_recipe.checkpoints import run_tokenizer
from pc_recipe.checkpoints.fingerprint import fingerprint
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.config import Config, load_config
from pc_recipe.config import write_config as write_resolved
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.data.manifest import Manifest
from pc_recipe.train import start
from pc_recipe.train.checkpoint import Checkpoints
from pc_recipe.train.llama2 import model_args_of
from pc_recipe.train.optimizers import Optimizers

SHAPES = {"norm.weight": (24,), "w.weight": (3, 2), "w.weight_orig": (3, 2), "w.weight_u": (3,)}
PLAIN = {name: shape for name, shape in SHAPES.items() if name in ("norm.weight", "w.weight")}
# from `python scripts/polynomials.py --cutoff 0.5 --degree 3`
OWN_MAP = ["--pc.level", "2.616097,-3.550208,2.730920,-0.796809"]
OTHER = {"name": "another", "sha256": "f" * 64}


@pytest.fixture
def config_of(tiny_config):
    """config_of(*words): the tiny config with PC."""
    return lambda *words: load_config(tiny_config[0], list(words))


@pytest.fixture
def tokenizer(tiny_shards):
    """Name and checksum of the data's."""
    return run_tokenizer.describe(Manifest.read(tiny_shards))


def _checkpoint(config: Config, tokenizer, path="elsewhere/checkpoint/step-3", shapes=SHAPES, has_method=True):
    """What a run of this config saves."""
    values = dict(fingerprint(config.pc, config.model, tokenizer or {"name": "", "sha256": ""}).items())
    if tokenizer is None:  # as older versions wrote it
        values["fingerprint"] = json.dumps(json.loads(values["fingerprint"]) | {"tokenizer": None})
    values = {f"method.{key}": value for key, value in values.items()} if has_method else {}
    kinds = {"adamw", config.optimizer.name.lower()} if has_method else ()
    saved = create_autospec(CheckpointFolder, instance=True)
    saved.path = Path(path)
    saved.shapes.return_value = {f"lr_scheduler.{kind}.last_epoch": None for kind in kinds} | {
        **dict.fromkeys(values), **{name: torch.Size(shape) for name, shape in shapes.items()}
    }  # fmt: skip
    saved.read_value.side_effect = values.__getitem__
    return saved


def _load(config: Config, newest=None, initial=None, rates=((0.1,), (0.1,)), ranks=1):
    """(what `start.load` returns, the checkpoint manager, the optimizers)."""
    manager, optimizers = create_autospec(Checkpoints, instance=True), create_autospec(Optimizers, instance=True)
    manager.states, manager.exclude_from_loading = {}, ["train_state"]
    manager.model_shapes.return_value = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    manager.newest_valid.side_effect = lambda load: load(newest) or newest if newest else None
    manager.verified.side_effect = {Path(config.checkpoint.initial_load_path or ""): initial}.__getitem__
    manager.read.side_effect = lambda *_, **__: manager.states.update(method="the checkpoint's")
    manager.call_on_rank_0.side_effect = lambda function: function()
    optimizers.preconditioner = create_autospec(Preconditioner, instance=True) if config.pc.enable else None
    optimizers.model_parts = ["the model"]
    optimizers.saved_rates, optimizers.rates.return_value = (list(each) for each in rates)
    try:
        data = Manifest.read(next(iter(config.data.folders)))
        return start.load(config, RankBatches.of(config, ranks), data, manager, optimizers), manager, optimizers
    except UserError:
        manager.read.assert_not_called()
        raise


@pytest.fixture(autouse=True)
def preserved(monkeypatch):
    """The models whose plain weights were preserved."""
    found: list = []
    monkeypatch.setattr(start, "preserve", found.append)
    return found


pytestmark = pytest.mark.usefixtures("one_process")


def test_a_run_continues_from_its_newest_checkpoint(config_of, tokenizer, preserved):
    """Whatever it started from; `exclude_from_loading` was for that start."""
    config = config_of("--checkpoint.initial_load_path", "other/step-9")
    newest = _checkpoint(config, OTHER | {"sha256": tokenizer["sha256"]}, path="run/checkpoint/step-3")
    loaded, manager, optimizers = _load(config, newest, _checkpoint(config, tokenizer))
    assert loaded == Path("run/checkpoint/step-3") and manager.read.mock_calls == [call(newest)]
    assert manager.exclude_from_loading == []
    assert optimizers.preconditioner.mock_calls == [call.note_loaded()] and not preserved
    # the tokenizer's name is that of this run's data
    assert json.loads(manager.states["method"]["fingerprint"])["tokenizer"] == tokenizer


@pytest.mark.parametrize("level", ["4", "3.625,-9.261,14.097,-10.351,2.890"])
def test_the_same_method_in_other_words_is_the_same(config_of, tokenizer, level):
    before = config_of("--pc.blocks", "o,ffn", "--pc.level", "4")
    now = config_of("--pc.blocks", "ffn,o", "--pc.level", level)
    assert _load(now, _checkpoint(before, tokenizer))[0]
    assert _load(now, _checkpoint(before, None))[0]  # of an older version


@pytest.mark.parametrize(
    "words, said",
    [
        (["--pc.enable", "false"], "pc.enable is True in the checkpoint, False in the config"),
        (OWN_MAP, r"pc.level is 4 in the checkpoint, \[2.616097, -3.550208"),
        (["--optimizer.name", "Muon"], "optimizer is adamw in the checkpoint, adamw and muon in the config"),
        (["--model.n_layers", "1"], "model.n_layers is 2 in the checkpoint, 1 in the config"),
        (["--model.rope_theta", "500"], "model.rope_theta is 10000.0 in the checkpoint, 500"),
    ],
)
def test_another_method_or_model_is_not_continued(config_of, tokenizer, words, said):
    saved = _checkpoint(config_of(), tokenizer)
    with pytest.raises(UserError, match=rf"cannot load elsewhere/checkpoint/step-3: {said}"):
        _load(config_of(*words), saved)
    from_all = ["--checkpoint.initial_load_path", "other", "--checkpoint.initial_load_model_only", "false"]
    with pytest.raises(UserError, match=said):
        _load(config_of(*words, *from_all), initial=saved)


def test_another_tokenizer_or_weights_alone_are_not_continued(config_of, tokenizer):
    config = config_of()
    with pytest.raises(UserError, match=r"step-3 belongs to tokenizer 'another' \(f{12}\), .* was made with tokenizer"):
        _load(config, _checkpoint(config, OTHER))
    with pytest.raises(UserError, match="step-3 holds weights alone, or another trainer wrote it"):
        _load(config, _checkpoint(config, tokenizer, has_method=False))


def test_a_new_run_without_a_start_loads_nothing(config_of, tokenizer):
    """Its checkpoints say whose they are."""
    loaded, manager, optimizers = _load(config_of())
    assert loaded is None and not manager.read.called and not optimizers.preconditioner.mock_calls
    assert json.loads(manager.states["method"]["fingerprint"])["tokenizer"] == tokenizer


@pytest.mark.parametrize("how", ["preserve", "raw", "baseline"])
def test_a_new_run_starts_from_plain_weights(config_of, tokenizer, preserved, how):
    words = ["--pc.enable", "false"] if how == "baseline" else ["--pc.start", how]
    config = config_of("--checkpoint.initial_load_path", "plain/step-2", *words)
    plain = _checkpoint(config, tokenizer, shapes=PLAIN)
    loaded, manager, optimizers = _load(config, initial=plain)
    assert loaded == Path("plain/step-2") and manager.read.mock_calls == [call(plain, model_only=True)]
    assert manager.exclude_from_loading == ["train_state"]
    assert preserved == ([["the model"]] if how == "preserve" else [])
    if how != "baseline":
        assert optimizers.preconditioner.mock_calls == ([call.restart()] if how == "raw" else [])
    assert manager.states["method"] != "the checkpoint's"


def test_a_new_run_starts_from_a_hugging_face_folder(config_of, tokenizer, preserved, tmp_path, monkeypatch):
    """`hf_folder.require_initial_load` reads its settings; unit/evaluate tests that."""
    asked: list = []
    required = SimpleNamespace(require_initial_load=lambda *given: asked.append(given))
    monkeypatch.setitem(sys.modules, "pc_recipe.checkpoints.hf_folder", required)
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": tokenizer}))
    words = ["--checkpoint.initial_load_path", str(tmp_path), "--checkpoint.initial_load_in_hf", "true"]
    # its weights alone are there, whatever the next key says
    config = config_of(*words, "--checkpoint.initial_load_model_only", "false")
    loaded, manager, optimizers = _load(config)
    assert loaded == tmp_path and manager.read.mock_calls == [call(tmp_path, model_only=True)]
    assert asked == [(tmp_path, model_args_of(config))]
    assert preserved == [["the model"]] and not optimizers.preconditioner.mock_calls
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": OTHER}))
    with pytest.raises(UserError, match="checkpoint.initial_load_path = .* belongs to tokenizer 'another'"):
        _load(config)


def test_weights_of_another_model_or_tokenizer_do_not_start_a_run(config_of, tokenizer):
    config = config_of("--checkpoint.initial_load_path", "plain/step-2")
    with pytest.raises(UserError, match="w.weight is None in the checkpoint"):
        _load(config, initial=_checkpoint(config, tokenizer, shapes={"norm.weight": (24,)}))
    other = _checkpoint(config, OTHER, shapes=PLAIN)
    with pytest.raises(UserError, match="checkpoint.initial_load_path = .* belongs to tokenizer 'another'"):
        _load(config, initial=other)
    config.checkpoint.initial_load_tokenizer_is_the_same = True  # the user knows better
    assert _load(config, initial=other)[0]


def test_a_new_run_starts_from_all_of_another(config_of, tokenizer, preserved):
    words = ["--checkpoint.initial_load_path", "other/step-2", "--checkpoint.initial_load_model_only", "false"]
    config = config_of(*words)
    other = _checkpoint(config, tokenizer)
    loaded, manager, optimizers = _load(config, initial=other)
    assert loaded == Path("other/step-2") and manager.read.mock_calls == [call(other, model_only=False)]
    assert optimizers.preconditioner.mock_calls == [call.note_loaded()] and not preserved


def test_without_checkpoints_only_the_same_run_is_repeated(config_of, tiny_config):
    folder, config = tiny_config[1], config_of("--checkpoint.enable", "false")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    write_resolved(config, folder / "config.toml")
    loaded, manager, _ = _load(config)
    assert loaded is None and not manager.newest_valid.called
    said = f"{folder} holds another run, which checkpoint.enable = false does not continue"
    with pytest.raises(UserError, match=said):
        _load(config_of("--checkpoint.enable", "false", "--data.seed", "5"))
    (folder / "checkpoint" / "step-3").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        _load(config)


def _said(monkeypatch, tokenizer, folder, before, now, rates=((0.1,), (0.1,)), before_on=None, on=1) -> list[str]:
    """What a resume on `on` ranks warns of; the run's folder has the config `before`, and perhaps a number of ranks."""
    lines: list[str] = []
    monkeypatch.setattr(start.logger, "warning", lines.append)
    folder.mkdir(exist_ok=True)
    write_resolved(before, folder / "config.toml")
    if before_on:
        (folder / "environment.json").write_text(json.dumps({"world_size": before_on}))
    _load(now, _checkpoint(now, tokenizer), rates=rates, ranks=on)
    return lines


def test_a_longer_run_says_how_its_learning_rate_continues(config_of, tokenizer, tiny_config, monkeypatch):
    def said(words, **more):
        return _said(monkeypatch, tokenizer, tiny_config[1], config_of(), config_of(*words), **more)

    assert said([]) == said([], rates=((0.1,), (0.10000001,))) == []  # which rounding may do
    assert said(["--debug.seed", "9", "--metrics.log_freq", "2"]) == []  # the first has no effect, as another line says
    changes = ["--training.steps", "12", "--optimizer.lr", "2e-2", "--data.validation_sequences", "1"]
    (line,) = said(changes, rates=((2e-2, 1e-2), (2e-2, 1.5e-2)))  # of two groups, that which changes most
    assert line.startswith("continues with ") and "optimizer.lr 0.01 -> 0.02" in line
    assert "data.validation_sequences 12 -> 1" in line and "training.steps 6 -> 12" in line
    assert line.endswith(
        ": the rate goes from 0.01 to 0.015 (--lr_scheduler.total_steps 6 keeps a schedule of 6 steps)"
    )
    assert said(["--data.validation_sequences", "1"]) == ["continues with data.validation_sequences 12 -> 1"]
    kept = ["--training.steps", "7", "--lr_scheduler.total_steps", "6"]
    (line,) = said(kept)  # the rate stays, but a schedule changed
    assert line.startswith(
        "continues with lr_scheduler.total_steps None -> 6, training.steps 6 -> 7: the rate is still 0.1"
    )
    (line,) = said([], rates=((0.1,), (0.2,)))  # an older version may have had another schedule
    assert line.startswith("continues with another schedule: the rate goes from 0.1 to 0.2")


def test_a_run_of_an_earlier_version_is_compared_with_what_it_was(config_of, tokenizer, tiny_config, monkeypatch):
    """Its config.toml has keys that are gone; with other values than those that hold now it does not go on."""
    folder = tiny_config[1]
    before, now = config_of(), config_of("--optimizer.lr", "2e-2")
    folder.mkdir(exist_ok=True)
    make_earlier(folder, before)
    lines: list[str] = []
    monkeypatch.setattr(start.logger, "warning", lines.append)
    _load(now, _checkpoint(now, tokenizer))
    assert lines == ["continues with optimizer.lr 0.01 -> 0.02"]
    make_earlier(folder, before, muon_steps=3)
    with pytest.raises(UserError, match="optimizer.muon_steps = 3 is of an earlier version"):
        start._say_what_changed(folder, now, RankBatches.of(now, 1), create_autospec(Optimizers, instance=True))


def test_a_batch_that_changes_with_the_number_of_ranks_is_reported(config_of, tokenizer, tiny_config, monkeypatch):
    """With training.global_batch_size = -1 it is a micro-batch of 2 sequences per rank."""
    config = config_of("--training.global_batch_size", "-1")
    unknown = _said(monkeypatch, tokenizer, tiny_config[1], config, config, on=3)
    (line,) = _said(monkeypatch, tokenizer, tiny_config[1], config, config, before_on=3)
    assert not unknown and "training.global_batch_size 6 -> 2" in line
    assert _said(monkeypatch, tokenizer, tiny_config[1], config, config, before_on=3, on=3) == []  # control


def test_only_rank_0_says_what_changed(config_of, tokenizer, tiny_config, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    changed = config_of("--optimizer.lr", "2e-2")
    assert _said(monkeypatch, tokenizer, tiny_config[1], config_of(), changed) == []
