"""The trainer on one and more ranks: equal losses, exact resume, correct checkpoints."""

import json
import os
import resource
import shutil
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers import tiny
from helpers.ranks import run_ranks

BASELINE = ["--pc.enable", "false"]
MUON = ["--optimizer.name", "Muon"]
# of `python scripts/polynomials.py --cutoff 0.5 --degree 3`
OWN_MAP = ["--pc.level", "2.616097,-3.550208,2.730920,-0.796809"]
FORWARD = ["--pc.schedule", "forward"]
HEADS = [*MUON, "--pc.blocks", "qk,v,o,ffn", "--pc.heads", "q,k,v", "--optimizer.muon_heads", "q,k,v"]


def _run(ranks, config, overrides=()):
    return run_ranks(ranks, tiny.train, config, list(overrides))[0]


def _elsewhere(tmp_path, name):
    return tmp_path / name, ["--job.dump_folder", str(tmp_path / name)]


def _equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("overrides", [[], [*MUON, *FORWARD]], ids=["pc", "muon-forward"])
def test_losses_do_not_depend_on_the_number_of_ranks(tiny_config, tmp_path, overrides):
    config, folder = tiny_config
    _run(1, config, overrides)
    expected = tiny.metrics(folder), tiny.metrics(folder, "validation_loss"), tiny.metrics(folder, "grad_norm")
    assert len(expected[0]) == 6 and len(expected[1]) == 3
    assert expected[0][-1] < expected[0][0] - 0.2  # it learns
    for ranks in (2, 3):
        other, to_other = _elsewhere(tmp_path, str(ranks))
        _run(ranks, config, [*overrides, *to_other])
        for key, values in zip(("loss", "validation_loss", "grad_norm"), expected, strict=True):
            # float32 sums in a different order, 1e-7 each, amplified by six steps at a learning rate of 1e-2; Muon's
            # bfloat16 iteration turns a changed last bit into 2^-8 of an update
            tolerance = 5e-3 if overrides else 1e-4
            assert tiny.metrics(other, key) == pytest.approx(values, rel=tolerance), (ranks, key)
    # control: another seed differs far more
    other, to_other = _elsewhere(tmp_path, "seed")
    _run(1, config, [*overrides, *to_other, "--debug.seed", "1"])
    assert tiny.metrics(other)[0] != pytest.approx(expected[0][0], rel=1e-3)


ASYNC = ["--checkpoint.async_mode", "async"]


@pytest.mark.parametrize(
    "ranks, overrides",
    [(1, OWN_MAP), (2, HEADS), (2, [*MUON, *FORWARD]), (2, ASYNC)],
    ids=["pc-own-map", "muon-heads-2", "muon-forward-2", "async-2"],
)
def test_resume_is_exact(tiny_config, tmp_path, ranks, overrides):
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
    assert (folder / "checkpoint.damaged" / "step-6").is_dir()


def test_a_run_without_a_whole_checkpoint_touches_none(tiny_config):
    config, folder = tiny_config
    _run(1, config)
    for file in folder.glob("checkpoint/*/__0_0.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="step-6.*no other checkpoint in .* is complete"):
        _run(1, config)
    assert sorted(path.name for path in folder.glob("checkpoint/*")) == ["step-3", "step-6"]
    assert not (folder / "checkpoint.damaged").exists()


def _train_with_little_disk(rank, config):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # less than a rank's part of a checkpoint
    tiny.train(rank, config, [])


def test_a_full_disk_is_said_in_a_line(tiny_config):
    config, folder = tiny_config
    with pytest.raises(AssertionError, match=r"WriteFailed: .*step-\d could not be written \(rank 0: File too large\)"):
        run_ranks(1, _train_with_little_disk, config)
    assert not list(folder.glob("checkpoint/*"))


def test_what_is_kept(tiny_config):
    config, folder = tiny_config
    _run(1, config, ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=2", "--checkpoint.keep_every=3"])
    kept = sorted(path.parent.name for path in folder.glob("checkpoint/*/.metadata"))
    assert kept == ["step-3", "step-4", "step-5", "step-6"]  # nothing is deleted after the last save


@pytest.mark.parametrize("before, after", [(1, 2), (2, 3)])
def test_resume_on_other_ranks(tiny_config, before, after):
    """The loaded state is equal bit for bit; later steps differ by the order of sums."""
    config, folder = tiny_config
    overrides = [*MUON, "--training.steps", "4", "--lr_scheduler.total_steps", "6"]
    _run(before, config, [*overrides, "--training.steps", "3"])
    saved = _load_all(folder / "checkpoint" / "step-3")
    loaded = run_ranks(after, _loaded_state, config, overrides)[0]
    assert set(loaded) == set(saved) and "pc.layers.0.attention.wo.raw" in loaded
    assert _equal(loaded, saved)


def _loaded_state(rank, config, overrides):
    from pc.settings import load_config
    from pc.titan.trainer import PCTrainer

    tiny.add_tiny_flavor()
    trainer = PCTrainer(load_config(config, overrides))
    trainer.load()
    optimizer = {
        f"optimizer.{key}": tiny.whole(value)
        for key, value in trainer.optimizers.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    learning_rates = {g["lr"] for o in trainer.optimizers for g in o.param_groups}
    assert len(learning_rates) == 1 and trainer.step == 3
    dims = trainer.parallel_dims
    assert trainer.ntokens_seen * dims.dp_replicate * dims.dp_shard == 3 * 24 * 16
    assert all(s.last_epoch == 3 for s in trainer.lr_schedulers.schedulers)
    state = {name: t for name, t in tiny.state_of(trainer).items() if not name.endswith(".gamma") or name[:3] == "pc."}
    trainer.close()
    return {**state, **optimizer}


def _load_all(checkpoint):
    """{name: full tensor} of a checkpoint."""
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "properties")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_checkpoint_holds_a_plain_llama_and_the_raw_weights(tiny_config):
    from torchtitan.models.llama3.model.model import Transformer

    import pc
    from pc.titan.llama2 import model_args

    config, folder = tiny_config
    trained = _run(2, config)
    saved = _load_all(folder / "checkpoint" / "step-6")
    tiny.add_tiny_flavor()
    args = model_args("tiny")
    args.vocab_size, args.max_seq_len = tiny.VOCAB_SIZE, 16
    plain = Transformer(args)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=str(folder / "checkpoint" / "step-6"), no_dist=True)
    plain.load_state_dict(state)  # strict: the names are those of a plain model
    assert torch.equal(plain.layers["1"].feed_forward.w2.weight, trained["layers.1.feed_forward.w2.weight"])
    layers = {name.removeprefix("pc.").rpartition(".")[0] for name in saved if name.startswith("pc.")}
    assert len(layers) == 8
    for name in layers:
        raw, gamma, u, v = (saved[f"pc.{name}.{key}"] for key in ("raw", "gamma", "u", "v"))
        effective = pc.effective_weight(raw, gamma, u, v, pc.PCConfig(level=4, blocks=("o",)))
        # the owner computed a batch of matrices, with another blocking of float32 matmuls
        torch.testing.assert_close(saved[f"{name}.weight"], effective, rtol=0, atol=1e-6)
        assert (saved[f"{name}.weight"] - raw).abs().max() > 1e-3  # control


def test_baseline_and_pc_start_from_the_same_raw_weights(tiny_config, tmp_path):
    config, _ = tiny_config
    nothing_learnt = ["--training.steps", "1", "--optimizer.lr", "0.0"]
    with_pc = _run(2, config, nothing_learnt)
    baseline = _run(1, config, [*nothing_learnt, *BASELINE, *_elsewhere(tmp_path, "baseline")[1]])
    for name, weight in baseline.items():
        raw = f"pc.{name.removesuffix('.weight')}.raw"
        assert torch.equal(with_pc.get(raw, with_pc[name]), weight), name


def test_plain_checkpoint_starts_a_pc_run(tiny_config, tmp_path):
    config, folder = tiny_config
    import pc

    trained, losses = _run(1, config, [*BASELINE, "--training.steps", "2"]), []
    start = ["--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-2")]
    nothing_learnt = ["--training.steps", "1", "--optimizer.lr", "0.0"]
    name = "layers.0.attention.wo"
    given = trained[f"{name}.weight"]
    for ranks, schedule in ((2, []), (1, FORWARD)):
        where = _elsewhere(tmp_path, f"preserve-{ranks}")
        started = _run(ranks, config, [*start, *nothing_learnt, *schedule, *where[1]])
        assert torch.equal(started["layers.0.attention.wq.weight"], trained["layers.0.attention.wq.weight"])
        raw = started[f"{name}.weight" if schedule else f"pc.{name}.raw"]
        gamma, u, v = (started[f"pc.{name}.{key}"] for key in ("gamma", "u", "v"))
        effective = pc.effective_weight(raw, gamma, u, v, pc.PCConfig(level=4))
        # float32 singular value decompositions; PC(W) of another W is another weight
        assert (effective - given).norm() < 1e-5 * given.norm() and (raw - given).norm() > 1e-2 * given.norm()
        if not schedule:
            assert (started[f"{name}.weight"] - given).norm() < 1e-5 * given.norm()
        losses.append(tiny.metrics(where[0])[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    where = _elsewhere(tmp_path, "raw")
    raw = _run(1, config, [*start, *nothing_learnt, "--pc.start", "raw", *where[1]])
    assert torch.equal(raw[f"pc.{name}.raw"], given) and not torch.equal(raw[f"{name}.weight"], given)
    assert abs(tiny.metrics(where[0])[0] - losses[0]) > 1e-3


@pytest.mark.parametrize(
    "first, then, message",
    [
        (BASELINE, [], "pc.enable: checkpoint False, config True"),
        (OWN_MAP, ["--pc.level", "2.6,-3.5,2.7,-0.8"], r"pc.level: checkpoint \[2.616097, .*, config \[2.6, -3.5,"),
        ([], MUON, "optimizer is adamw in the checkpoint, adamw and muon in the config"),
        ([], ["--model.flavor", "debug"], r"\[200, 24\]\) in the checkpoint, torch.Size\(\[200, 256\]"),
    ],
)
def test_resume_with_another_method_is_refused(tiny_config, first, then, message):
    config, _ = tiny_config
    _run(1, config, [*first, "--training.steps", "1"])
    with pytest.raises(AssertionError, match=message):
        _run(1, config, [*then, "--training.steps", "2"])


def test_equal_methods_said_otherwise_resume(tiny_config):
    config, folder = tiny_config
    _run(1, config, ["--training.steps", "1"])
    level_4 = ["--pc.level", "3.625,-9.261,14.097,-10.351,2.890"]
    _run(1, config, ["--training.steps", "2", "--pc.blocks", "ffn,o", *level_4])
    assert len(tiny.metrics(folder)) == 2


def _train_in_job(rank, config, overrides, job):
    os.environ["SLURM_JOB_ID"] = job
    return tiny.train(rank, config, overrides)


def test_a_step_to_go_back_to_must_be_there(tiny_config):
    config, folder = tiny_config
    with pytest.raises(AssertionError, match=r"UserError: .*checkpoint/step-2: no such checkpoint"):
        _run(1, config, ["--checkpoint.load_step", "2"])
    assert not (folder / "metrics.jsonl").exists() and not (folder / "checkpoint").exists()


def test_an_abandoned_branch_is_not_taken_up_again(tiny_config):
    """After `load_step` the newest checkpoint is the new branch's, also for a requeued job with the same command."""
    config, folder = tiny_config
    words = ["--checkpoint.interval", "2", "--lr_scheduler.total_steps", "6"]
    straight = run_ranks(2, tiny.train, config, words)[0]
    back = [*words, "--checkpoint.load_step", "2", "--data.skip", "48-71"]  # another branch

    def steps(name="checkpoint"):
        return sorted(path.name for path in folder.glob(f"{name}/*"))

    run_ranks(2, _train_in_job, config, [*back, "--training.steps", "3"], "7")
    assert steps() == ["step-2", "step-3"] and steps("checkpoint.abandoned") == ["step-4", "step-6"]
    assert tiny.metrics(folder, "step") == [1, 2, 3]
    abandoned = (folder / "metrics.abandoned.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in abandoned} == {3, 4, 5, 6}
    (folder / "metrics.jsonl").unlink()
    requeued = run_ranks(2, _train_in_job, config, back, "7")[0]  # from step 3
    assert len(tiny.metrics(folder)) == 3 and steps() == ["step-2", "step-3", "step-4", "step-6"]
    assert not _equal(requeued, straight)
    assert _equal(run_ranks(2, tiny.train, config, words)[0], requeued)  # nothing left to do
    run_ranks(2, _train_in_job, config, [*words, "--checkpoint.load_step", "2", "--training.steps", "3"], "8")
    assert steps("checkpoint.abandoned") == ["step-3", "step-4", "step-4.1", "step-6", "step-6.1"]


def _settings_of_optimizers(rank, config, overrides):
    """Learning rates and weight decays of the run's last step, from the live optimizers."""
    from pc.titan.optimizers import LRSchedulers

    used = []

    def step(schedulers, upstream=LRSchedulers.step):
        groups = [group for scheduler in schedulers.schedulers for group in scheduler.optimizer.param_groups]
        used.append([(float(group["lr"]), group["weight_decay"]) for group in groups])
        upstream(schedulers)

    LRSchedulers.step = step
    tiny.train(rank, config, overrides)
    return used


def test_a_resume_uses_the_settings_of_its_config(tiny_config, tmp_path):
    config, folder = tiny_config
    words = [*MUON, "--lr_scheduler.total_steps", "6"]
    changed = [*words, "--optimizer.lr", "1e-3", "--optimizer.weight_decay", "0.3"]
    other, elsewhere = _elsewhere(tmp_path, "whole")
    whole = run_ranks(1, _settings_of_optimizers, config, [*changed, *elsewhere])[0]
    _run(1, config, [*words, "--training.steps", "3"])
    resumed = run_ranks(1, _settings_of_optimizers, config, changed)[0]
    assert len(whole) == 6 and resumed == whole[3:]
    assert {decay for step in resumed for _, decay in step} == {0.3}
    assert tiny.metrics(folder, "lr")[3:] == tiny.metrics(other, "lr")[3:]


def test_metrics_after_the_step_that_a_run_restarts_from_are_moved(tiny_config):
    config, folder = tiny_config
    _run(1, config)
    shutil.rmtree(folder / "checkpoint" / "step-6")
    _run(1, config, ["--training.steps", "4"])
    assert tiny.metrics(folder, "step") == [1, 2, 3, 4]


def test_tokens_after_a_change_of_the_global_batch(tiny_config):
    config, folder = tiny_config
    _run(1, config, ["--training.steps", "3", "--health.freq", "1"])
    _run(1, config, ["--training.global_batch_size", "48", "--health.freq", "1", "--metrics.log_freq", "2"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = {1: 384, 2: 768, 3: 1152, 4: 1920, 5: 2688, 6: 3456}  # 24 sequences of 16 tokens, then 48
    assert len(lines) > 10 and all(line["tokens"] == tokens[line["step"]] for line in lines)


def _refused(rank, config, overrides):
    from pc.errors import UserError
    from pc.launch.worker import Trainer
    from pc.settings import load_config

    tiny.add_tiny_flavor()
    trainer, recorded = Trainer(load_config(config, overrides)), []
    try:
        trainer.train(recorded.append)
    except UserError as error:
        return str(error), recorded
    finally:
        trainer.close()
    return "accepted", recorded


def test_a_refused_resume_does_not_touch_the_record(tiny_config):
    config, folder = tiny_config
    _run(1, config)
    before = (folder / "status.json").read_text()
    message, recorded = run_ranks(1, _refused, config, ["--data.seed", "5", "--training.steps", "8"])[0]
    assert "data.seed" in message and not recorded and (folder / "status.json").read_text() == before
    assert run_ranks(1, _refused, config, ["--training.steps", "8"])[0] == ("accepted", [6])  # control


def test_a_torn_first_checkpoint_does_not_hide_the_start(tiny_config, tmp_path):
    config, folder = tiny_config
    trained = _run(1, config, [*BASELINE, "--training.steps", "2"])
    other, to_other = _elsewhere(tmp_path, "requeued")
    (other / "checkpoint" / "step-1").mkdir(parents=True)  # as after a kill during the first save
    start = ["--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-2")]
    started = _run(2, config, [*start, *to_other, *BASELINE, "--training.steps", "1", "--optimizer.lr", "0.0"])
    assert _equal(started, trained)
    assert (other / "checkpoint.damaged" / "step-1").is_dir()


def test_raw_weights_of_schedule_forward_are_no_start(tiny_config, tmp_path):
    config, folder = tiny_config
    _run(1, config, [*FORWARD, "--training.steps", "1"])
    start = ["--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-1")]
    with pytest.raises(AssertionError, match="holds raw weights"):
        _run(1, config, [*start, *BASELINE, *_elsewhere(tmp_path, "other")[1]])


def _train_with_signal(rank, config, overrides, at_step):
    from pc.launch import worker

    class Interrupted(worker.Trainer):
        def train_step(self, data_iterator):
            super().train_step(data_iterator)
            if self.step == at_step and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)

    original, worker.Trainer = worker.Trainer, Interrupted
    try:
        return tiny.train(rank, config, overrides)
    finally:
        worker.Trainer = original


def test_a_signal_to_one_rank_stops_all_and_the_run_continues(tiny_config, tmp_path):
    config, folder = tiny_config
    other, to_other = _elsewhere(tmp_path, "straight")
    straight = _run(2, config, to_other)
    # It stops after a validation, which gathers weights; the checkpoint must have the sharded ones.
    run_ranks(2, _train_with_signal, config, ["--validation.freq", "2"], 2)
    assert json.loads((folder / "status.json").read_text()) == {
        "state": "stopped", "step": 2, "steps": 6, "reason": "asked to stop"
    }  # fmt: skip
    assert _equal(_run(2, config), straight)
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert tiny.metrics(folder) == tiny.metrics(other)
