"""Compiled blocks and activation checkpointing with PC: no graph break, no recompilation, the same losses.

Only the compiler's front end (backend aot_eager), because only that can break or recompile.
"""

import pytest
import torch

from helpers import tiny
from helpers.ranks import run_ranks

COMPILE = ["--compile.enable", "true", "--compile.components", "model", "--compile.backend", "aot_eager"]
FULL = ["--activation_checkpoint.mode", "full"]
SELECTIVE = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "2"]
PER_OPERATION = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
TP2 = ["--parallelism.tensor_parallel_degree", "2"]
PP2 = ["--parallelism.pipeline_parallel_degree", "2"]
QUICK = [
    *("--training.steps", "3", "--validation.enable", "false", "--checkpoint.enable", "false"),
    *("--activation_checkpoint.mode", "none", "--training.local_batch_size", "6"),
]
DIAGNOSTICS = ["--diagnostics.freq", "3"]  # in the first step and the last

# Name, added words, number of graphs. All blocks share one graph, except that
# - blocks with and without checkpointing have one each;
# - steps with measured outputs have another one (pc_recipe.train.activations).
CASES = {
    1: [
        ("full AC", FULL, 1),
        ("AC of every second block", SELECTIVE, 2),
        ("AC by operation", PER_OPERATION, 1),  # as in the recipes
        ("outputs measured on some steps", DIAGNOSTICS, 2),
    ],
    2: [
        # the loss is not compiled, although the option asks for it
        ("TP2, AC by operation", [*TP2, *PER_OPERATION, "--compile.components", "model,loss"], 1),
        ("PP2", PP2, 1 if torch.__version__ >= (2, 13) else 2),  # torch 2.11 makes two
    ],
}


def _train_counted(rank, config, cases) -> list[tuple[int, dict]]:
    """For each case the number of compiled graphs, and the reasons for graph breaks."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    results = []
    for overrides in cases:
        torch._dynamo.reset()
        counters.clear()
        tiny.train(rank, config, overrides)
        results.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    return results


@pytest.fixture(scope="module")
def eager(tiny_shards, tmp_path_factory):
    """Config, and run folder of one eager process without activation checkpointing."""
    folder = tmp_path_factory.mktemp("compile")
    config = tiny.write_config(folder / "tiny.toml", tiny_shards, folder / "run")
    assert run_ranks(1, _train_counted, config, [QUICK])[0] == [(0, {})]
    return config, folder / "run"


@pytest.mark.parametrize("ranks", CASES)
def test_no_break_no_recompilation_same_losses(eager, tmp_path, ranks):
    config, eager_folder = eager
    cases = [[*QUICK, *COMPILE, *added, "--job.dump_folder", str(tmp_path / name)] for name, added, _ in CASES[ranks]]
    for counts in run_ranks(ranks, _train_counted, config, cases):
        for (name, _, graphs), count in zip(CASES[ranks], counts, strict=True):
            assert count == (graphs, {}), name
    for name, *_ in CASES[ranks]:
        for key in ("loss", "grad_norm"):
            # a different order of float32 operations, 1e-7, amplified by three steps
            expected = pytest.approx(tiny.metrics(eager_folder, key), rel=2e-6)
            assert tiny.metrics(tmp_path / name, key) == expected, (name, key)
