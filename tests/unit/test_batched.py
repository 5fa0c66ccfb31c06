"""experiments/batched.py: many runs in one process give what each gives by itself, and what the recipe gives."""

import json

import pytest
import torch

from experiments import batched, evidence
from helpers import tiny
from helpers.ranks import run_ranks
from pc.errors import UserError
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.runs.sweep.spec import load

SWEEP = """
configs = ["tiny.toml"]
seeds = [1, 2]
folder = "{folder}/runs"
[axes]
"training.local_batch_size" = [12]
"training.mixed_precision_param" = ["float32"]
"optimizer.lr" = [{rates}]
{axes}
[variants.baseline]
"pc.enable" = false
[variants.scale]
"pc.enable" = false
"model.init_factors" = {{ o = 1.7, ffn = 1.7 }}
"optimizer.lr_factors" = {{ o = 2.1, ffn = 2.1 }}
"optimizer.independent_decay" = {independent}
[variants.level-4]
"pc.enable" = true
"pc.level" = 4
"""


@pytest.fixture
def sweep_of(tmp_path, tiny_shards):
    def make(rates: str = "1e-2", independent: str = "false", axes: str = ""):
        tiny.write_config(tmp_path / "tiny.toml", tiny_shards, tmp_path / "run")
        (tmp_path / "some.toml").write_text(
            SWEEP.format(folder=tmp_path, rates=rates, independent=independent, axes=axes)
        )
        return load(tmp_path / "some.toml")

    return make


def trained(configs) -> batched.Training:
    state = batched.Training(configs, torch.device("cpu"))
    data = batched.batches(configs, torch.device("cpu"))
    for _ in range(configs[0].training.steps):
        state.advance(next(data))
    return state


def weights_of(state: batched.Training, run: int) -> dict[str, torch.Tensor]:
    """By checkpoint name."""
    weights = {name: weight.detach()[run] for name, weight in state.used.items()}
    for name in state.turned if run < state.with_pc else ():
        weights[f"{name}.weight_orig"] = state.trained[f"{name}.weight"][run]
        weights[f"{name}.weight_gamma"] = state.trained[name][run]
    return weights


def largest_difference(one: dict, other: dict) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_runs_together_give_what_each_gives_alone_and_what_the_recipe_gives(sweep_of, tmp_path):
    runs = sorted(sweep_of().runs, key=lambda run: not run.resolved.pc.enable)
    assert [run.variant for run in runs[1:4]] == ["level-4", "baseline", "baseline"]
    together = trained([run.resolved for run in runs])
    validated = together.validate()
    for index in (1, 4):  # level 4 with seed 2, scale with seed 1
        weights, run = weights_of(together, index), runs[index]
        alone = largest_difference(weights, weights_of(trained([run.resolved]), 0))
        # PC's products of small matrices are cut into other blocks if the batch is larger
        assert alone == 0 if index > 1 else alone < 1e-5
        [recipe] = run_ranks(1, tiny.train, tmp_path / "tiny.toml", list(run.overrides))
        # other sums in float32, which AdamW divides by small numbers; another seed is the control
        assert largest_difference(weights, recipe) < 1e-4
        assert largest_difference(weights_of(together, index - 1), weights) > 0.1
        [*_, final] = tiny.metrics(run.folder, VALIDATION)
        assert validated[index].item() == pytest.approx(final, abs=1e-5)


def test_rows_are_those_of_an_experiment_and_one_that_diverged_harms_no_other(sweep_of, tmp_path):
    sweep, output = sweep_of("1e-2, 1e6"), tmp_path / "rows"
    assert batched.train(sweep, output, end=float("inf"))
    [file] = output.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(row["resolved"]["optimizer"]["lr"], row["state"]) for row in rows} == {
        (1e-2, "finished"),
        (1e6, "diverged"),
    }
    file.rename(output / "runs.jsonl")
    [experiment] = evidence.read_experiments(output)
    assert list(experiment.runs.arm.unique()) == ["baseline", "scale", "level-4"]
    assert (experiment.runs.rate[experiment.runs.best] == 1e-2).all()


def test_a_sweep_that_would_not_end_in_time_is_given_up(sweep_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batched, "PROGRESS", 1)
    monkeypatch.setattr(batched, "TRIED", 2)
    assert not batched.train(sweep_of(), tmp_path / "rows", end=0.0)
    assert "step 2/6" in (said := capsys.readouterr().out) and "step 3/6" not in said and "given up" in said
    [file] = (tmp_path / "rows").iterdir()
    assert file.name == "some.partial.jsonl"
    file.rename(tmp_path / "rows" / "runs.jsonl")
    with pytest.raises(UserError, match="/seed-1 was last validated after step 1 of 6; "):
        evidence.read_experiments(tmp_path / "rows")


@pytest.mark.parametrize(
    "changed, said",
    [
        ('"pc.learnable_gamma" = [false]', "pc.learnable_gamma: should be True"),
        ('"pc.heads" = [["q"]]', "pc.heads: should be "),
        ('"checkpoint.initial_load_path" = ["other"]', "checkpoint.initial_load_path: should be None"),
        ('"data.path" = [{ one = 1.0, other = 2.0 }]', "data.path: should be one folder"),
    ],
)
def test_settings_that_it_does_not_have_are_refused(sweep_of, changed, said):
    with_pc = [run for run in sweep_of(axes=changed).runs if run.variant == "level-4"]
    with pytest.raises(UserError, match=said):
        batched.require_alike(with_pc)


def test_runs_that_differ_in_more_are_refused(sweep_of):
    with pytest.raises(UserError, match="differ in optimizer.independent_decay; train them in two sweeps"):
        batched.require_alike(sweep_of(independent="true").runs)
