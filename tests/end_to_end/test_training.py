"""The trainer: exact resume, what a checkpoint holds, what is refused, going back, and stopping on a signal."""

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers import tiny
from helpers.format_1 import make_format_1
from helpers.ranks import run_ranks
from pc.command import describe_end
from pc.errors import UserError
from pc_recipe.checkpoints.fingerprint import read_tokenizer
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.writer import ChecksummedWriter
from pc_recipe.config import load_config
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.files.run_log import read_log

BASELINE = ["--pc.enable", "false"]
MUON = ["--optimizer.name", "Muon"]
# from `python scripts/polynomials.py --cutoff 0.5 --degree 3`
OWN_MAP = ["--pc.level", "2.616097,-3.550208,2.730920,-0.796809"]
HEADS = [*MUON, "--pc.blocks", "qk,v,o,ffn", "--pc.heads", "q,k,v", "--optimizer.muon_heads", "q,k,v"]
MUON_H, ADAM_H = (["--optimizer.name", name] for name in ("MuonH", "AdamH"))
ASYNC = ["--checkpoint.async_mode", "async"]
NOTHING_LEARNT = ["--training.steps", "1", "--optimizer.lr", "0.0", "--lr_scheduler.warmup_steps", "1"]


def _run(ranks, config, overrides=()):
    return run_ranks(ranks, tiny.train, config, list(overrides))[0]


def _elsewhere(tmp_path, name):
    return ["--job.dump_folder", str(tmp_path / name)]


def _equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def _steps(folder):
    return sorted(path.name for path in folder.glob("checkpoint/*"))


@pytest.fixture(scope="module")
def trained(tiny_shards, tmp_path_factory):
    """A whole run on two ranks: config, folder, final state."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny.write_config(folder / "tiny.toml", tiny_shards, folder / "run")
    return config, folder / "run", _run(2, config)


@pytest.fixture
def copied(trained, tmp_path):
    """Config of a copy of that run, and its folder."""
    folder = shutil.copytree(trained[1], tmp_path / "run")
    config = tmp_path / "tiny.toml"
    config.write_text(trained[0].read_text().replace(str(trained[1]), str(folder)))
    return config, folder


@pytest.fixture(scope="module")
def plain(tiny_shards, tmp_path_factory):
    """A baseline after two steps: the arguments that start a run from its checkpoint, and its state."""
    folder = tmp_path_factory.mktemp("plain")
    config = tiny.write_config(folder / "tiny.toml", tiny_shards, folder / "run")
    state = _run(1, config, [*BASELINE, "--training.steps", "2"])
    return ["--checkpoint.initial_load_path", str(folder / "run" / "checkpoint" / "step-2")], state


@pytest.mark.parametrize(
    "ranks, overrides",
    [(2, [*OWN_MAP, *ASYNC]), (2, HEADS), (1, MUON), (2, MUON_H), (2, ADAM_H)],
    ids=["pc-own-map-async-2", "muon-heads-2", "muon", "muonh-2", "adamh-2"],
)
def test_resume_is_exact(tiny_config, ranks, overrides):
    config, folder = tiny_config
    straight = _run(ranks, config, overrides)
    expected = tiny.metrics(folder), tiny.metrics(folder, "validation_loss")
    # the same run again, whose newest checkpoint is damaged by one bit
    (folder / "metrics.jsonl").unlink()
    file = folder / "checkpoint" / "step-6" / f"__{ranks - 1}_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = _run(ranks, config, overrides)
    assert _equal(straight, resumed)
    assert tiny.metrics(folder) == expected[0][3:]
    assert tiny.metrics(folder, "validation_loss") == expected[1][-1:]
    assert (folder / "checkpoint" / "step-6.damaged").is_dir()


def _as_an_older_version_wrote_it(checkpoint, data):
    """Save the checkpoint again with format 1's checksum of the data, and without a tokenizer."""
    folder = CheckpointFolder(checkpoint)
    tensors = folder.read_tensors([key for key, shape in folder.shapes().items() if shape is not None])
    values = {key: folder.read_value(key) for key, shape in folder.shapes().items() if shape is None}
    shutil.rmtree(checkpoint)
    method, identity = (json.loads(values[key]) for key in ("method.fingerprint", "dataloader.identity"))
    del method["tokenizer"]
    identity["data.path (its content)"] = json.loads((data / "manifest.json").read_text())["configuration_sha256"]
    values |= {"method.fingerprint": json.dumps(method), "dataloader.identity": json.dumps(identity)}
    dcp.save(tensors | values, storage_writer=ChecksummedWriter(checkpoint), no_dist=True)


def test_a_run_that_an_older_version_began_goes_on_exactly(trained, copied, tiny_shards, tmp_path):
    config, folder = copied
    given = {file.name: file.read_bytes() for file in (tiny_shards.parent / "tokenizer").iterdir()}
    data = make_format_1(shutil.copytree(tiny_shards, tmp_path / "data"), given, "huggingface")
    config.write_text(config.read_text().replace(str(tiny_shards), str(data)))
    shutil.rmtree(folder / "checkpoint" / "step-6")
    _as_an_older_version_wrote_it(folder / "checkpoint" / "step-3", data)
    assert read_tokenizer(CheckpointFolder(folder / "checkpoint" / "step-3")) is None
    assert _equal(_run(2, config), trained[2])
    assert tiny.metrics(folder) == tiny.metrics(trained[1])
    # control: it does not continue with other data
    shutil.rmtree(folder / "checkpoint" / "step-6")
    with pytest.raises(AssertionError, match=r"made with data.path \(its content\) = .*, this run has "):
        _run(2, config, ["--data.path", str(tiny_shards)])


def test_a_resumed_run_names_its_own_tokenizer(tiny_config, tiny_shards, tmp_path):
    """Not that of the checkpoint that it continues from, which may name none if an older version wrote it."""
    config, folder = tiny_config
    _run(1, config, ["--training.steps", "3", "--checkpoint.last_save_model_only", "false"])
    shutil.copytree(tiny_shards / "tokenizer", tmp_path / "moved")
    text = tiny_shards.parent / "text.parquet"
    again = tokenize(str(text), tmp_path / "again", tokenizer=str(tmp_path / "moved"), validation_fraction=0.2)
    _run(1, config, ["--data.path", str(again.folder), "--checkpoint.last_save_model_only", "false"])
    names = [read_tokenizer(CheckpointFolder(folder / "checkpoint" / f"step-{step}"))["name"] for step in (3, 6)]
    assert names == [str(tiny_shards.parent / "tokenizer"), str(tmp_path / "moved")]


def test_checkpoint_holds_a_plain_llama_and_w(trained):
    from torchtitan.models.llama3.model.model import Transformer

    import pc
    from helpers.tiny import model_args

    _, folder, state = trained
    saved = tiny.load_all(folder / "checkpoint" / "step-6")
    plain = Transformer(model_args("tiny", vocab_size=tiny.VOCAB_SIZE, max_seq_len=16))
    wanted = plain.state_dict()
    dcp.load(wanted, checkpoint_id=str(folder / "checkpoint" / "step-6"), no_dist=True)
    plain.load_state_dict(wanted)  # strict: the names are those of a plain model
    assert torch.equal(plain.layers["1"].feed_forward.w2.weight, state["layers.1.feed_forward.w2.weight"])
    weights = [name.removesuffix("_orig") for name in saved if name.startswith("layers.") and name.endswith("_orig")]
    assert len(weights) == 8
    for name in weights:
        orig, gamma, u, v = (saved[f"{name}_{key}"] for key in ("orig", "gamma", "u", "v"))
        effective = pc.effective_weight(orig, gamma, u, v, pc.PCConfig(level=4, blocks=("o",)))
        # the owner computed a batch of matrices, whose float32 matmuls sum in another order
        torch.testing.assert_close(saved[name], effective, rtol=0, atol=1e-6)
        assert (saved[name] - orig).abs().max() > 1e-3  # control


def test_the_size_of_a_checkpoint_is_the_estimate(trained):
    """Weights, W and optimizer states; the estimate leaves out gammas and vectors, which are small."""
    from pc_recipe.plan import memory

    config = load_config(trained[0])
    saved = tiny.load_all(trained[1] / "checkpoint" / "step-6")
    elements = sum(tensor.numel() for name, tensor in saved.items() if not name.endswith(("_u", "_v")))
    assert memory.estimate_checkpoint_bytes(config, memory.count_sizes(config)) == pytest.approx(
        4 * elements, rel=0.005
    )


def test_baseline_and_pc_start_from_the_same_w(tiny_config, tmp_path):
    config, _ = tiny_config
    with_pc = _run(2, config, NOTHING_LEARNT)
    baseline = _run(1, config, [*NOTHING_LEARNT, *BASELINE, *_elsewhere(tmp_path, "baseline")])
    for name, weight in baseline.items():
        assert torch.equal(with_pc.get(f"{name}_orig", with_pc[name]), weight), name


def test_plain_checkpoint_starts_a_pc_run(tiny_config, tmp_path, plain):
    config, name = tiny_config[0], "layers.0.attention.wo"
    start, trained = plain
    given = trained[f"{name}.weight"]
    preserved = _run(2, config, [*start, *NOTHING_LEARNT])
    assert torch.equal(preserved["layers.0.attention.wq.weight"], trained["layers.0.attention.wq.weight"])
    # up to float32 singular value decompositions; control: W itself is another weight
    assert (preserved[f"{name}.weight"] - given).norm() < 1e-5 * given.norm()
    assert (preserved[f"{name}.weight_orig"] - given).norm() > 1e-2 * given.norm()
    raw = _run(1, config, [*start, *NOTHING_LEARNT, "--pc.start", "raw", *_elsewhere(tmp_path, "raw")])
    assert torch.equal(raw[f"{name}.weight_orig"], given) and not torch.equal(raw[f"{name}.weight"], given)


def test_a_torn_first_checkpoint_does_not_hide_the_start(tiny_config, plain):
    config, folder = tiny_config
    (folder / "checkpoint" / "step-1").mkdir(parents=True)  # as after a kill during the first save
    assert _equal(_run(1, config, [*plain[0], *BASELINE, *NOTHING_LEARNT]), plain[1])
    assert (folder / "checkpoint" / "step-1.damaged").is_dir()


def test_initial_weights_of_another_model_are_refused(tiny_config, plain):
    config, _ = tiny_config
    ((message, _),) = run_ranks(1, _starts, config, [[*plain[0], *BASELINE, "--model.n_layers", "1"]])[0]
    assert "model.n_layers is 2 in" in message


def _starts(rank, config, cases):
    """For each case the error that refuses the start ("" if none), and the steps that were recorded."""
    said = []
    for overrides in cases:
        trainer, recorded, message = tiny.make_trainer(config, overrides), [], ""
        try:
            trainer.train(recorded.append)
        except UserError as error:
            message = str(error)
        trainer.close()
        said.append((message, recorded))
    return said


REFUSED = {
    "pc.enable is True in the checkpoint, False in the config": BASELINE,
    "pc.level is 4 in the checkpoint, [2.616097, -3.550208": OWN_MAP,
    "optimizer is adamw in the checkpoint, adamw and muon in the config": MUON,
    "model.n_layers is 2 in the checkpoint, 1 in the config": ["--model.n_layers", "1"],
    "model.rope_theta is 10000.0 in the checkpoint, 500": ["--model.rope_theta", "500"],
    "data.seed": ["--data.seed", "5"],
    "training.steps = 5 is below step 6": ["--training.steps", "5"],
}


def test_a_refused_start_touches_nothing(copied):
    """The same method in other words is accepted."""
    config, folder = copied
    before = (folder / "status.json").read_text()
    found = run_ranks(1, _starts, config, [["--training.steps", "8", *words] for words in REFUSED.values()])[0]
    for (message, recorded), expected in zip(found, REFUSED, strict=True):
        assert expected in message and not recorded
    assert (folder / "status.json").read_text() == before and _steps(folder) == ["step-3", "step-6"]
    level_4 = ["--pc.blocks", "ffn,o", "--pc.level", "3.625,-9.261,14.097,-10.351,2.890"]
    # exclude_from_loading applies to a new run from another's checkpoint, not to a resume
    excluded = ["--checkpoint.exclude_from_loading", "train_state"]
    assert run_ranks(1, _starts, config, [[*level_4, *excluded, "--training.steps", "7"]])[0] == [("", [6])]


def test_a_new_run_from_all_of_another_is_recorded_as_new(copied, tmp_path):
    """It begins at the other run's step, but its own folder holds no run, so all of its settings apply."""
    config, folder = copied
    start = ["--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-3")]
    words = [*start, "--checkpoint.initial_load_model_only", "false", *_elsewhere(tmp_path, "new")]
    assert run_ranks(1, _starts, config, [words, ["--training.steps", "7", *words]])[0] == [("", [0]), ("", [6])]


def test_an_abandoned_branch_is_not_taken_up_again(copied):
    """To go back, move newer checkpoints away: the run continues from the newest that is left, here with other data."""
    config, folder = copied
    straight = tiny.metrics(folder)
    (folder / "checkpoint" / "step-6").rename(folder / "step-6")
    _run(1, config, ["--data.skip", "36-47"])
    assert tiny.metrics(folder, "step") == [1, 2, 3, 4, 5, 6]
    log = read_log(folder).lines
    assert [line["step"] for line in log if "loss" in line] == [1, 2, 3, 4, 5, 6]  # once each
    branch = tiny.metrics(folder)
    assert branch[:3] == straight[:3] and branch[3] != pytest.approx(straight[3], rel=1e-6)


def test_a_resume_uses_the_settings_of_its_config(copied):
    """unit/train/test_optimizers.py tests more settings of optimizers."""
    config, folder = copied
    rates = tiny.metrics(folder, "lr")
    shutil.rmtree(folder / "checkpoint" / "step-6")
    changed = ["--optimizer.lr", "1e-3", "--training.global_batch_size", "24"]
    _run(1, config, [*changed, "--diagnostics.freq", "1", "--metrics.log_freq", "2"])
    assert tiny.metrics(folder, "lr")[-1] == pytest.approx(rates[-1] / 10)
    lines = read_log(folder).lines
    tokens = {1: 192, 2: 384, 3: 576, 4: 960, 5: 1344, 6: 1728}  # 12 sequences of 16 tokens, then 24
    assert len(lines) > 8 and all(line["tokens"] == tokens[line["step"]] for line in lines)


def _train_and_say(rank, config, overrides):
    from pc_recipe.train import trainer

    with mock.patch.object(trainer.logger, "warning") as warning:
        made = tiny.make_trainer(config, overrides)
        made.train()
        made.close()
    tiny.write_resolved(made.config, Path(made.config.job.dump_folder) / "config.toml")
    return next(call[0][0] for call in warning.call_args_list if "continues with" in call[0][0])


def test_a_longer_run_says_how_its_learning_rate_continues(copied):
    config, folder = copied
    before = tiny.metrics(folder, "lr")
    kept = ["--training.steps", "7", "--lr_scheduler.total_steps", "6"]
    (said,) = run_ranks(1, _train_and_say, config, kept)
    assert tiny.metrics(folder, "lr") == pytest.approx([*before, before[-1]])  # the schedule is kept, and has ended
    assert said.startswith(
        "continues with lr_scheduler.total_steps None -> 6, training.steps 6 -> 7: the rate goes from "
    )
    changes = [
        "--training.steps",
        "12",
        "--optimizer.lr",
        "2e-2",
        "--data.validation_sequences",
        "1",
        "--debug.seed",
        "9",
    ]
    (said,) = run_ranks(1, _train_and_say, config, changes)
    assert "optimizer.lr 0.01 -> 0.02" in said and "training.steps 7 -> 12" in said
    assert "data.validation_sequences" in said and "debug.seed" not in said  # which has no effect, as another line says
    rates = re.search(r"goes from (.*) to (.*) \(--lr_scheduler.total_steps 6 keeps", said)
    assert [float(rate) for rate in rates.groups()] == pytest.approx(
        [before[-1], tiny.metrics(folder, "lr")[7]], rel=1e-2
    )


def test_a_batch_that_changes_with_the_number_of_ranks_is_reported(copied):
    """With training.global_batch_size = -1 it is a micro-batch of 2 sequences per rank."""
    config, folder = copied
    earlier = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(earlier.replace("global_batch_size = 12", "global_batch_size = -1"))
    (folder / "environment.json").write_text(json.dumps({"world_size": 3}))
    (said,) = run_ranks(1, _train_and_say, config, ["--training.global_batch_size", "-1", "--training.steps", "7"])
    assert "training.global_batch_size 6 -> 2" in said


def test_no_second_run_in_a_folder(copied, tiny_config):
    """A run without checkpoints begins at step 1 again; it may be repeated only with the same settings."""
    config, folder = copied
    names = [path.name for path in folder.rglob("*")]
    without = ["--checkpoint.enable", "false"]
    ((message, recorded),) = run_ranks(1, _starts, config, [without])[0]
    assert f"{folder} holds another run, which checkpoint.enable = false does not continue" in message and not recorded
    assert [path.name for path in folder.rglob("*")] == names
    words = [*without, "--training.steps", "2", *_elsewhere(folder, "own")]
    _run(1, config, words)
    (_, again), (message, _) = run_ranks(1, _starts, config, [words, [*words, "--data.seed", "5"]])[0]
    assert again == [0] and "holds another run" in message


def _train_on_a_disk_that_fails(rank, config, overrides):
    """Rank 1's disk fails in step 4, whose data have been read ahead."""
    import numpy as np

    from pc_recipe.files import look

    look.PAUSES = (0.0, 0.0)

    class Trainer(tiny.trainer_class()):
        def train_step(self, data):
            if self.step == 4 and rank == 1:
                np.fromfile = mock.Mock(side_effect=OSError(errno.EIO, "made by the test"))
            super().train_step(data)

    trainer = Trainer(load_config(config, overrides))
    tiny.write_resolved(trainer.config, Path(trainer.config.job.dump_folder) / "config.toml")
    try:
        trainer.train()
    except UserError as error:
        return f"{describe_end(error)[0]}: {error}"


def test_unreadable_data_end_a_run_with_a_checkpoint(trained, tmp_path):
    config, folder, state = trained
    there = _elsewhere(tmp_path, "failing")
    for said in run_ranks(2, _train_on_a_disk_that_fails, config, there):
        assert re.fullmatch(r"failed: .*tokens.npy: could not be read \(made by the test\); nothing was changed", said)
    assert _steps(tmp_path / "failing") == ["step-3", "step-4"]
    assert _equal(_run(2, config, there), state) and tiny.metrics(tmp_path / "failing") == tiny.metrics(folder)


def _train_where_all_else_is_slow(rank, config, overrides):
    """Loading takes two seconds; validation and checkpoint after a step take half a second each."""
    trainer = tiny.make_trainer(config, overrides)
    save = trainer.checkpointer.save
    trainer.checkpointer.save = lambda *args, **more: (time.sleep(0.5), save(*args, **more))
    trainer.validator.is_due, trainer.validator.validate = lambda step: True, lambda trainer: time.sleep(0.5)
    trainer.train(lambda step: time.sleep(2.0))
    trainer.close()


def test_step_times_exclude_loading_validation_and_checkpoints(tiny_config):
    config, folder = tiny_config
    run_ranks(1, _train_where_all_else_is_slow, config, ["--training.steps=4", "--checkpoint.interval=1"])
    seconds = tiny.metrics(folder, "step_seconds")
    assert len(seconds) == 4 and min(seconds) > 0
    assert seconds[0] < 2.0 and max(seconds[1:]) < 0.5  # without the pauses, tenths and hundredths of a second


def _train_with_signal(rank, config, overrides):
    """Rank 1 is signalled in step 2."""
    trainer = tiny.make_trainer(config, overrides)
    begin_step = trainer._begin_step

    def signalled():
        if trainer.step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        begin_step()

    trainer._begin_step = signalled
    trainer.train()
    trainer.close()


def test_a_signal_to_one_rank_stops_all_and_the_run_continues(tiny_config, trained):
    config, folder = tiny_config
    # It stops after a validation, which gathers weights; the checkpoint must have the sharded ones. It is a full
    # checkpoint, because it is not the run's last.
    stop = ["--validation.freq", "2", "--checkpoint.last_save_model_only", "true"]
    run_ranks(2, _train_with_signal, config, stop)
    assert json.loads((folder / "status.json").read_text()) == {
        "state": "stopped", "step": 2, "steps": 6, "reason": "asked to stop"
    }  # fmt: skip
    assert _equal(_run(2, config), trained[2])
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert tiny.metrics(folder) == tiny.metrics(trained[1])
