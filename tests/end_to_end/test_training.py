"""Whole runs: exact resume, what a checkpoint holds, going back, and stopping on a signal. The parts: unit/train."""

import json
import os
import shutil
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers import tiny
from helpers.format_1 import make_format_1
from helpers.ranks import run_ranks
from pc_recipe.checkpoints.fingerprint import read_tokenizer
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.writer import ChecksummedWriter
from pc_recipe.config import load_config
from pc_recipe.files.run_log import read_log

BASELINE = ["--pc.enable", "false"]
# from `python scripts/polynomials.py --cutoff 0.5 --degree 3`
OWN_MAP = ["--pc.level", "2.616097,-3.550208,2.730920,-0.796809"]
HEADS = [
    "--optimizer.name",
    "Muon",
    "--pc.blocks",
    "qk,v,o,ffn",
    "--pc.heads",
    "q,k,v",
    "--optimizer.muon_heads",
    "q,k,v",
]
ASYNC = ["--checkpoint.async_mode", "async"]
NOTHING_LEARNT = ["--training.steps", "1", "--optimizer.lr", "0.0", "--lr_scheduler.warmup_steps", "1"]


def _run(ranks, config, overrides=()):
    return run_ranks(ranks, tiny.train, config, list(overrides))[0]


def _elsewhere(tmp_path, name):
    return ["--job.dump_folder", str(tmp_path / name)]


def _equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


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
    [(2, [*OWN_MAP, *ASYNC]), (2, HEADS)],
    ids=["pc-own-map-async-2", "muon-heads-2"],
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
