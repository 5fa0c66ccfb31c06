"""Every shipped TOML loads and dry-runs; the main ones have the paper's numbers."""

import math

import pytest

from helpers.tiny import ROOT
from pc_recipe.config import load_config
from pc_recipe.plan.check import check
from pc_recipe.runs.sweep import equal_runs
from pc_recipe.runs.sweep.spec import load

ARMS = ROOT / "train_configs" / "sweeps" / "arms.toml"
STUDIES = [ROOT / "experiments" / name for name in ("small", "regime", "conditioning", "rivals")]
SWEEPS = sorted({*(ROOT / "train_configs").rglob("sweeps/*.toml")} - {ARMS}) + [
    path for study in STUDIES for path in sorted(study.glob("sweeps/*.toml"))
]
LARGE = sorted(path for size in ("7b", "13b", "70b") for path in (ROOT / "train_configs").glob(f"{size}_*.toml"))
CONFIGS = sorted(set((ROOT / "train_configs").glob("*.toml")) - set(LARGE))
SMALL = [path for study in STUDIES for path in sorted(study.glob("configs/*.toml"))]

# flavor, optimizer, PC level or None, peak LR, steps, warmup, tokens (G)
PAPER = {
    "271m_adamw_baseline": ("271M", "AdamW", None, 8.486e-4, 22_000, 220, 57),
    "271m_adamw_pc": ("271M", "AdamW", 4, 8.486e-4, 22_000, 220, 57),
    "271m_muon_baseline": ("271M", "Muon", None, 4.243e-3, 22_000, 220, 57),
    "271m_muon_pc": ("271M", "Muon", 2, 4.243e-3, 22_000, 220, 57),
    "1b_adamw_baseline": ("1B", "AdamW", None, 3e-4, 61_100, 611, 160),
    "1b_adamw_pc": ("1B", "AdamW", 4, 3e-4, 61_100, 611, 160),
    "1b_muon_baseline": ("1B", "Muon", None, 1.5e-3, 61_100, 611, 160),
    "1b_muon_pc": ("1B", "Muon", 2, 1.5e-3, 61_100, 611, 160),
}
PARAMETERS = {"271M": 271_090_688, "1B": 1_055_991_808}


@pytest.mark.parametrize("name", PAPER)
def test_main_configs_hold_the_papers_numbers(name):
    flavor, optimizer, level, lr, steps, warmup, giga_tokens = PAPER[name]
    path = ROOT / "train_configs" / f"{name}.toml"
    config = load_config(path)
    training = config.training
    assert config.model.flavor == flavor and config.model.vocab_size == 32_000
    assert config.pc.enable == (level is not None)
    if level is not None:
        assert config.pc.level == level
        assert config.pc.blocks == ["o", "ffn"]
        assert config.pc.power_iterations == 10 and config.pc.norm_recovery and config.pc.learnable_gamma
    assert (config.optimizer.name, config.optimizer.lr) == (optimizer, lr)
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps) == (0.9, 0.95, 1e-8)
    assert config.optimizer.weight_decay == 0.1
    assert config.optimizer.muon_momentum == 0.95
    assert (training.seq_len, training.global_batch_size) == (8192, 320)
    assert (training.steps, config.lr_scheduler.warmup_steps) == (steps, warmup)
    assert math.floor(training.steps * 320 * 8192 / 1e9) == giga_tokens
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.min_lr_factor) == ("cosine", 0.1)
    assert config.lr_scheduler.decay_ratio is None  # cosine from the end of the warmup
    assert training.max_norm == 1.0
    assert config.validation.enable and config.validation.freq == 500
    assert config.data.validation_sequences * 8192 == pytest.approx(21e6, rel=5e-3)
    assert config.compile.enable and training.mixed_precision_param == "bfloat16"
    assert config.checkpoint.enable and not config.checkpoint.last_save_model_only
    parameters = dict(check(load_config(path), 8, needs_data=False).facts)["parameters"]
    assert parameters.startswith(f"{PARAMETERS[flavor]:,},")


@pytest.mark.parametrize(
    "path, world_size, batch",
    [
        (path, ranks, {"debug": 16, "demo": 16, "own_text": 64}.get(path.stem, 320))
        for path in CONFIGS
        if path.stem != "base"
        for ranks in ((1,) if path.stem == "demo" else (8, 1))  # the demo's launcher starts one process
    ]
    + [(path, 1, 32 if path.stem[:4] in ("nano", "micr") else 64) for path in SMALL]  # one micro-batch, for one process
    + [(path, 64, 1024) for path in LARGE],
)
def test_every_config_dry_runs(path, world_size, batch, monkeypatch):
    monkeypatch.chdir(ROOT)
    report = check(load_config(path), world_size, needs_data=False)
    assert report.errors == []
    assert dict(report.facts)["batch"].startswith(f"{batch} sequences")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", ["271m_adamw_pc", "271m_muon_baseline", "1b_adamw_pc", "1b_muon_baseline"])
def test_main_configs_keep_their_batch_and_fit_80_gb_on_1_to_128_gpus(name, ranks):
    """320 is not divisible by 128, so on 128 GPUs two share each sequence; without that, the error proposes it."""
    path, words = ROOT / "train_configs" / f"{name}.toml", []
    if ranks == 128:
        assert check(load_config(path, words), ranks, needs_data=False).errors == [
            "training.global_batch_size = 320 is not a multiple of 128 data-parallel ranks; "
            "parallelism.tensor_parallel_degree = 2 leaves 64 of them"
        ]
        words = ["--parallelism.tensor_parallel_degree=2"]
    report = check(load_config(path, words), ranks, needs_data=False)
    facts = dict(report.facts)
    assert report.errors == [] and facts["batch"].startswith("320 sequences")
    assert float(facts["memory per GPU"].split()[0]) <= 0.85 * 79
    assert load_config(path).activation_checkpoint.mode == "none"


@pytest.mark.parametrize(
    "overlay, name, ranks, gpu_gib",
    [
        (None, "271m_adamw_pc", 1, 23.5),
        (None, "1b_adamw_pc", 1, 39.4),
        ("24gb", "271m_adamw_pc", 1, 23.5),
        ("24gb", "1b_muon_pc", 1, 23.5),
        ("24gb", "1b_adamw_pc", 2, 23.5),
        *(("8_nodes", name, 64, 79) for name in PAPER),
    ],
)
def test_overlays_fit_the_machine_of_their_name(overlay, name, ranks, gpu_gib):
    path, words = ROOT / "train_configs" / f"{name}.toml", []
    if overlay:
        words = ["--overlay", str(ROOT / "train_configs" / "overlays" / f"{overlay}.toml")]
    report = check(load_config(path, words), ranks, needs_data=False, gpu_gib=gpu_gib)
    assert report.errors == [] and dict(report.facts)["batch"].startswith("320 sequences")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_loads_and_each_first_run_dry_runs(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = load(path)
    assert check(sweep.runs[0].resolved, 1 if "experiments" in path.parts else 8, needs_data=False).errors == []


@pytest.mark.parametrize(
    "name, lrs",
    [
        ("271m_adamw_lr", [3.0e-4, 4.243e-4, 6.0e-4, 8.486e-4, 1.2e-3, 1.697e-3, 2.4e-3, 3.394e-3]),
        ("271m_muon_lr", [1.061e-3, 1.5e-3, 2.122e-3, 3.001e-3, 4.243e-3, 6.001e-3, 8.486e-3, 1.2e-2]),
        ("1b_adamw_lr", [5.303e-5, 7.5e-5, 1.061e-4, 1.5e-4, 2.121e-4, 3.0e-4, 4.243e-4]),
        ("1b_muon_lr", [7.5e-4, 1.061e-3, 1.5e-3, 2.121e-3, 3.0e-3, 4.243e-3]),
    ],
)
def test_lr_grids_are_the_papers(name, lrs):
    """Both ends and the paper's choice are exact; the values between are evenly spaced from rounded ends."""
    sweep = load(ROOT / "train_configs" / "sweeps" / f"{name}.toml")
    assert [run.settings["optimizer.lr"] for run in sweep.runs] == lrs
    selected = load_config(ROOT / "train_configs" / f"{name.removesuffix('_lr')}_baseline.toml")
    assert selected.optimizer.lr in lrs


def test_all_271m_experiments_train_equal_runs_once(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = ["271m_main", "271m_adamw_lr", "271m_muon_lr", "pc_level", "pc_blocks", "recovery_gamma", "polar_express"]
    sweeps = [load(f"train_configs/sweeps/{name}.toml") for name in names]
    groups = equal_runs.group_runs(sweeps)
    assert sum(len(sweep.runs) for sweep in sweeps) - len(groups) == 7  # of 50 runs while there are four levels
    shared = [run.name for group in groups if group.runs[0].name == "271m_adamw_pc" for run in group.runs[1:]]
    assert shared == [
        "271m_adamw_pc/level-4",
        "271m_adamw_pc/blocks-ffn+o",
        "norm_recovery-true_learnable_gamma-true",
    ]
