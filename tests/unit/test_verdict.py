"""The arms of experiments/verdict: what they do to singular values, norms and steps, and that a resume is exact."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from experiments.verdict import choose, reference
from experiments.verdict.arms import Dial, Retract
from helpers import tiny
from helpers.ranks import run_ranks
from helpers.tiny import model_args
from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.train.llama2 import Llama2
from pc_recipe.train.optimizers import Optimizers

ARMS = "experiments.verdict.arms"
BASELINE = ["--pc.enable", "false"]
NAME = "layers.0.feed_forward.w1"


def arm_words(kind: str, **options) -> list[str]:
    text = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    return ["--experiment.arm", f"{ARMS}:{kind}", "--experiment.options", f"{{{text}}}"]


@pytest.fixture(scope="module")
def run(tiny_shards, tmp_path_factory):
    """run(name, *words): trains the tiny model into a folder of that name; (folder, final state)."""
    top = tmp_path_factory.mktemp("verdict")
    config = tiny.write_config(top / "tiny.toml", tiny_shards, top / "run")

    def run(name: str, *words: str):
        [state] = run_ranks(1, tiny.train, config, [*words, "--job.dump_folder", str(top / name)])
        return top / name, state

    return run


@pytest.fixture(scope="module")
def watched(run):
    return run("watched", *BASELINE, *arm_words("Watch", every=1))


@pytest.fixture(scope="module")
def own(watched):
    """A reference file made from the watched run alone."""
    file = watched[0] / "reference.json"
    file.write_text(json.dumps(reference.mean_of([watched[0]])))
    return str(file)


def test_a_rate_is_chosen_once_a_worse_one_is_on_both_sides(tmp_path, monkeypatch, capsys):
    """Here only for the baseline: Muon's best rate is an end of its grid, and with level 2 a rate lacks a seed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(tiny.ROOT / "experiments")
    losses = {
        "baseline": {0.008: [1.50, 1.48], 0.01131: [1.48, 1.49], 0.016: [1.47, None]},
        "muon": {0.032: [1.43, 1.43], 0.04525: [1.42, 1.42]},
        "muon-level-2": {0.032: [1.43, 1.43], 0.04525: [1.41], 0.064: [1.42, 1.42], 0.0905: [1.45, 1.45]},
    }
    lines = [
        {
            "config": f"configs/{arm}.toml",
            "variant": arm,
            "seed": seed,
            "settings": {"optimizer.lr": rate},
            VALIDATION: loss,
        }
        for arm, of_arm in losses.items()
        for rate, of_seeds in of_arm.items()
        for seed, loss in enumerate(of_seeds, start=1)
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("sys.argv", ["choose", str(tmp_path)])
    choose.main()
    arms = tomllib.loads(Path("outputs/verdict/rates.toml").read_text())["arms"]
    assert arms["baseline"] == {"pc.enable": False, "optimizer.lr": 0.01131}
    assert "optimizer.lr" not in arms["muon"] | arms["muon-level-2"]
    assert "not chosen: a rate lacks a seed" in capsys.readouterr().out
    [more] = Path("outputs/verdict").glob("verdict_more_*")
    sweep = tomllib.loads(more.read_text())
    assert sweep["variants"] == {"muon": {"optimizer.lr": 0.06399}} and sweep["seeds"] == [1, 2]


def test_the_runner_ends_with_its_commands_status(tmp_path):
    """So that the next command of a line such as `a && b` does not start."""
    (tmp_path / "python").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    command = [tiny.ROOT / "experiments" / "verdict" / "run.sh", "1", "a.toml"]
    assert subprocess.run(command, env=os.environ | {"PYTHON": str(tmp_path / "python")}).returncode == 2


def largest_difference(one: dict, other: dict) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_watching_changes_nothing_and_own_singular_values_almost_nothing(run, watched, own):
    assert largest_difference(watched[1], run("plain", *BASELINE)[1]) == 0
    same = run("same", *BASELINE, *arm_words("Dial", spectrum=own))[1]
    other = run("other", *BASELINE, *arm_words("Dial", spectrum=own, power=0.5))[1]
    assert largest_difference(watched[1], same) < 1e-3 < 0.05 < largest_difference(watched[1], other)


def test_a_resume_is_exact(run, own):
    words = [*BASELINE, *arm_words("Dial", spectrum=own, power=0.5, scale=own), "--lr_scheduler.total_steps", "6"]
    whole = run("whole", *words)[1]
    run("parts", *words, "--training.steps", "3")
    assert largest_difference(whole, run("parts", *words)[1]) == 0


def test_the_log_has_w_and_the_weight_that_is_used(run):
    folder, state = run("pc", *arm_words("Watch"), "--pc.level", "4")
    last = list(reference.read_log(folder).values())[-1]
    assert last.keys() == {f"layers.{n}.{m}" for n in (0, 1) for m in (
        "attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"
    )}  # fmt: skip
    for kind, tensor in (
        ("weight", state[f"{NAME}.weight"]),
        ("raw", state[f"{NAME}.weight_orig"]),
        ("after_gain", state[f"{NAME}.weight"] * state["layers.0.ffn_norm.weight"]),
    ):
        sigma = torch.linalg.svdvals(tensor.double())
        found = last[NAME][kind]
        assert found["norm"] == pytest.approx(sigma.norm().item(), rel=1e-6)
        assert found["quantiles"][4] == pytest.approx(sigma[0].item(), rel=1e-6)
    assert last[NAME]["weight"]["condition"] < last[NAME]["raw"]["condition"]
    assert "raw" not in last["layers.0.attention.wq"] and "after_gain" not in last["layers.0.attention.wo"]


@pytest.fixture
def made(tmp_path):
    """A model, its optimizers and the config of a run without PC."""
    torch.manual_seed(0)
    model = Llama2(model_args("nano", vocab_size=64))
    model.init_weights()
    config = Config(job={"dump_folder": str(tmp_path)})
    return model, Optimizers([model], config.optimizer), config


@pytest.fixture
def file(made, tmp_path) -> str:
    """A reference: at steps 0 and 20 spectra that fall by 1 % and 3 % per value, norms 1 and 1.2, steps 0.1 and 0.3."""
    names = [name.removesuffix(".weight") for name, _ in made[0].named_parameters() if "layers." in name]
    spectra = torch.stack([0.99 ** torch.arange(128.0), 0.97 ** torch.arange(128.0)])
    one = {
        "spectrum": (spectra / spectra.norm(dim=-1, keepdim=True)).tolist(),
        "norm": [1.0, 1.2],
        "change": [0.1, 0.3],
    }
    file = tmp_path / "reference.json"
    file.write_text(json.dumps({"steps": [0, 20], "matrices": dict.fromkeys(names, one)}))
    return str(file)


@pytest.mark.parametrize("power", [1.0, 1 / 3, 0.0, 1.2])
def test_the_dial_sets_singular_values_and_leaves_norm_and_vectors(made, file, power):
    model, optimizers, config = made
    dial = Dial([model], optimizers, config, spectrum=file, power=power)
    weight = model.layers["0"].feed_forward.w1.weight
    query = model.layers["0"].attention.wq.weight.clone()
    dial.before_step(20)
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape) / 50)
    u, sigma, vt = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    dial.change(20)
    wanted = (0.97 ** torch.arange(128.0, dtype=torch.float64)) ** power
    expected = (u * (sigma.norm() / wanted.norm() * wanted)) @ vt
    torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=2e-5)  # the dial computes in float32
    assert torch.equal(model.layers["0"].attention.wq.weight, query)


def test_the_dial_sets_norms_and_lengths_of_steps_too(made, file):
    model, optimizers, config = made
    dial = Dial([model], optimizers, config, spectrum=file, scale=file)
    weight = model.layers["0"].attention.wo.weight
    assert weight.norm().item() == pytest.approx(1.0, rel=1e-5)  # from the first step on
    for step in range(1, 21):
        dial.before_step(step)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)) / 1000)
        dial.change(step)
        length = 0.1 + 0.2 * step / 20
        assert (weight.detach() - before).norm().item() == pytest.approx(length * before.norm().item(), rel=0.02)
        assert weight.norm().item() == pytest.approx(1 + 0.2 * step / 20, rel=1e-5)


@pytest.mark.parametrize("keep_norm", [True, False])
def test_a_retraction_moves_singular_values_towards_pc(made, keep_norm):
    model, optimizers, config = made
    arm = Retract([model], optimizers, config, strength=0.25, keep_norm=keep_norm)
    weight = model.layers["0"].attention.wo.weight
    u, sigma, vt = torch.linalg.svd(weight.detach().double())
    arm.change(1)
    x = sigma / sigma[0]
    pulled = sigma[0] * (3.625 * x - 9.261 * x**3 + 14.097 * x**5 - 10.351 * x**7 + 2.890 * x**9)
    new = 0.75 * sigma + 0.25 * pulled
    new = new * (sigma.norm() / new.norm() if keep_norm else 1)
    torch.testing.assert_close(weight.detach().double(), (u * new) @ vt, rtol=0, atol=1e-5)


def test_arms_that_change_w_refuse_pc_and_a_file_that_is_no_reference(made, tmp_path):
    model, optimizers, config = made
    with pytest.raises(UserError, match="no.json is no reference"):
        Dial([model], optimizers, config, spectrum=str(tmp_path / "no.json"))
    with pytest.raises(UserError, match="pc.enable = false"):
        Retract([model], optimizers, Config(pc={"enable": True}), strength=0.1)
