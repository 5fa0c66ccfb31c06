"""The dry run finds what is wrong, and its sums are right."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torchtitan.distributed.activation_checkpoint import apply_ac

from helpers.tiny import ROOT
from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.config.schema import ActivationCheckpoint
from pc_recipe.runs import memory
from pc_recipe.runs.check import check
from pc_recipe.train.llama2 import Llama2, model_args
from pc_recipe.train.parallelize import SAVED_OPERATIONS
from pc_recipe.train.upstream_config import JobConfig

CONFIG = ROOT / "train_configs" / "1b_adamw_pc.toml"


def test_all_faults_come_at_once_and_each_once():
    words = [
        "--pc.level=9",
        "--lr_scheduler.warmup_steps=70000",
        "--checkpoint.exclude_from_loading=pc",
        "--data.path=none",
    ]
    with pytest.raises(UserError) as raised:
        check(CONFIG, words, 3).raise_errors("here: ")
    for key in (
        "pc.level = ",
        "lr_scheduler.warmup_steps = ",
        "checkpoint.exclude_from_loading = ",
        "data.path: ",
        "3 GPUs",
    ):
        assert str(raised.value).count(key) <= 1, key
    assert str(raised.value).count("error: ") == 4  # and the first without the word


@pytest.mark.parametrize(
    "words, kept",
    [
        ([], 5),  # three, one that is being written, and one that was damaged and set aside
        (["--checkpoint.keep_every=10000"], 5 + 6),
        (["--checkpoint.keep_latest_k=0"], 122 + 2),
        (["--checkpoint.keep_latest_k=0", "--checkpoint.keep_every=750"], 122 + 81 - 40 + 2),  # every 1500 by both
    ],
)
def test_the_disk_of_a_whole_run(words, kept):
    facts = dict(check(CONFIG, words, 8, needs_data=False).facts)
    size = 4 * (4 * 1_055_991_808 - 1_055_991_808 + 698_351_616) / 2**30  # weights, two moments and raw W; no gammas
    needed, found, each = (float(facts["checkpoint disk"].split()[place]) for place in (0, 5, 8))
    assert found == kept and each == pytest.approx(size, rel=1e-3) and needed == pytest.approx(kept * size, rel=1e-2)


@pytest.mark.parametrize(
    "method, words",
    [("cap", "singular values at most 0.5"), ("row_norm", "rows of equal norm"), ("polynomial", "o: level 4")],
)
@pytest.mark.parametrize("name, states", [("AdamH", 2), ("MuonH", 1)])
def test_methods_and_optimizers_are_named_and_counted(method, words, name, states):
    """Of one GPU: the matrices of the blocks with the optimizer's states, embedding, head and norms with two."""
    levels = ["--pc.level", "{ o = 4, ffn = 2 }"] if method == "polynomial" else []
    overrides = ["--pc.method", method, "--pc.cap", "0.5", "--optimizer.name", name, *levels]
    facts = dict(check(CONFIG, overrides, 1, needs_data=False).facts)
    assert words in facts["preconditioned"]
    elements = states * 924_844_032 + 2 * (1_055_991_808 - 924_844_032)
    found = float(re.search(r"optimizer ([0-9.]+)", facts["memory per GPU"])[1])
    assert found == pytest.approx(4 * elements / 2**30, abs=0.006)


def test_data_are_checked_against_the_model(tiny_shards):
    words = [f"--data.path={tiny_shards}", "--training.seq_len=16", "--data.validation_sequences=100000"]
    report = check(ROOT / "train_configs" / "debug.toml", words, 1)
    assert report.errors == []
    assert any("validation sequences" in warning for warning in report.warnings)
    report = check(ROOT / "train_configs" / "debug.toml", [*words, "--model.vocab_size=10"], 1)
    assert any("model.vocab_size is 10" in error for error in report.errors)
    report = check(ROOT / "train_configs" / "debug.toml", [*words, "--training.seq_len=1000000"], 1)
    assert any("too few for one sequence" in error for error in report.errors)


@pytest.mark.parametrize("mode, option", [("none", "op"), ("selective", "op"), ("selective", "2"), ("full", "op")])
def test_activations_against_torchs_tracker(mode, option):
    """Every tensor that a 60M forward pass leaves behind, uncompiled and in float32, by torch's own count."""
    tokens, batch = 512, 2
    args = model_args("60M", max_seq_len=tokens // batch)
    checkpointing = ActivationCheckpoint(mode=mode, selective_ac_option=option)
    with FakeTensorMode():
        model = Llama2(args)
        sizes = memory.count_sizes(model)
        if mode != "none":
            apply_ac(
                model,
                JobConfig(Config(activation_checkpoint=checkpointing)).activation_checkpoint,
                model_compile_enabled=False,
                op_sac_save_list=SAVED_OPERATIONS,
                base_folder="",
            )
        inputs = torch.zeros(batch, tokens // batch, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, inputs)
        with tracker:
            logits = model(inputs)
            left = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    kept = left[_MemRefType.ACT] - 4 * logits.numel()
    outside = 4 * tokens * 3 * sizes.dim  # the embedding's output, and the last norm's input and output
    expected = 4 * tokens * sizes.layers * memory.count_kept_per_block(sizes, checkpointing)
    # uncompiled, q and k are kept before and after their rotation: two of 21 vectors that the estimate leaves out
    assert kept - outside == pytest.approx(expected, rel=0.11 if mode == "none" or option == "2" else 0.01)


def test_the_papers_1b_run_is_in_range():
    """65.9 GiB measured by the paper for the baseline; the estimate leaves out what it says it does. Not compiled,
    since the paper's code cannot compile PC, which it compares with this. PC in the graph made it 72.2."""
    settings = ["--training.local_batch_size=4", "--compile.enable=false"]
    settings += ["--pc.mode=forward", "--pc.compute_dtype=float32"]
    facts = [
        dict(check(ROOT / "train_configs" / f"1b_adamw_{method}.toml", settings, 8, needs_data=False).facts)
        for method in ("baseline", "pc")
    ]
    plain, with_pc = (float(one["memory per GPU"].split()[0]) for one in facts)
    assert 0.75 * 65.9 < plain < 65.9
    one_more = 72 * 2048**2 * 2 / 2**30  # Horner's rule, as in the paper's code, keeps a square matrix more
    assert with_pc - plain + one_more == pytest.approx(72.2 - 65.9, rel=0.1)
