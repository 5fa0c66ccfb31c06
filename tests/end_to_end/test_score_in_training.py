"""Scoring the live model on several ranks: the same scores as on one, no deadlock, no effect on training."""

import random

import numpy as np
import pytest
import torch

from helpers import tiny
from helpers.made_runs import make_evaluation_data, make_shards
from helpers.ranks import run_ranks

NAMES = ["piqa", "arc_easy", "lambada_openai"]
SETTINGS = [
    "--model.vocab_size", "32000",
    "--training.seq_len", "64",
    "--training.global_batch_size", "8",
    "--validation.local_batch_size", "2",
    "--checkpoint.enable", "false",
    "--evaluation.interval", "2",
    "--evaluation.tasks", ",".join(NAMES),
]  # fmt: skip


@pytest.fixture(scope="module")
def score_config(tmp_path_factory):
    """A tiny model whose vocabulary is the default tokenizer's, and three items per task."""
    folder = tmp_path_factory.mktemp("scoring")
    shards = make_shards(folder)
    config = tiny.write_config(folder / "tiny.toml", shards, folder / "run")
    return config, [*SETTINGS, "--evaluation.data", str(make_evaluation_data(folder / "sets"))]


def _scores(rank, config, overrides):
    """The metrics, and log-likelihoods [answers, 2] of all answers and of the first alone."""
    from lm_eval.api.instance import Instance

    trainer = tiny.make_trainer(config, overrides)
    scorer = trainer.scorer
    assert [scorer.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    metrics = scorer.score()
    assert metrics == scorer.score()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))
    assert all(model.training for model in trainer.model_parts)
    # 9 answers in 5 batches of two: on two ranks one has none in the last round;
    # then fewer batches than ranks
    requests = [Instance("loglikelihood", {}, ("word " * i + "and", " an end"), i) for i in range(9)]
    answers = [torch.tensor(scorer.lm.loglikelihood(some), dtype=torch.float64) for some in (requests, requests[:1])]
    trainer.close()
    return metrics, *answers


def test_scores_do_not_depend_on_ranks(score_config):
    config, overrides = score_config
    plain = [*overrides, "--pc.enable", "false"]
    ((metrics, *expected),) = run_ranks(1, _scores, config, plain)
    assert set(metrics) == {
        "evaluation/piqa/acc", "evaluation/arc_easy/acc_norm", "evaluation/lambada_openai/acc",
        "evaluation/average",
    }  # fmt: skip
    assert len(expected[0].unique()) > 9  # control: the answers differ
    for parallelism in ([], ["--parallelism.tensor_parallel_degree", "2"]):
        for found, *answers in run_ranks(2, _scores, config, [*plain, *parallelism]):
            assert found == metrics
            # float32 sums of 64 tokens at most; only tensor parallelism changes their order
            torch.testing.assert_close(answers, expected, rtol=1e-5, atol=1e-5)


EVERYTHING_ELSE = [
    *("--compile.enable", "true", "--compile.components", "model", "--compile.backend", "aot_eager"),
    *("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
    *("--diagnostics.freq", "1", "--diagnostics.spectra_freq", "2", "--validation.freq", "2"),
]


def test_a_run_logs_scores_and_is_not_disturbed(score_config, tmp_path):
    """Compiled, checkpointed, with diagnostics and validation."""
    config, overrides = score_config
    for name, own in {"with": [], "without": ["--evaluation.interval", "0"]}.items():
        folder = ["--job.dump_folder", str(tmp_path / name), "--training.steps", "2"]
        run_ranks(2, tiny.train, config, [*overrides, *EVERYTHING_ELSE, *own, *folder])
    for key in ("loss", "validation_loss", "grad_norm"):
        assert tiny.metrics(tmp_path / "with", key) == tiny.metrics(tmp_path / "without", key)
    assert len(tiny.metrics(tmp_path / "with", "evaluation/average")) == 1
    assert tiny.metrics(tmp_path / "without", "evaluation/average") == []
    for key, times in (("signal/ffn/rms/1", 2), ("spectra/gmcn/pc", 2)):
        assert len(tiny.metrics(tmp_path / "with", key)) == times
        assert tiny.metrics(tmp_path / "with", key) == tiny.metrics(tmp_path / "without", key)
