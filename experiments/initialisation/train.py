"""Train what the plan in README.md asks for next, N runs at a time, and collect the rows of what has ended. Repeat to continue.

python -m experiments.initialisation.train 2        # 0: only collect

Each run has one thread and the lowest priority. SIGTERM or Ctrl-C saves and stops. What has been collected in runs.jsonl, on
any machine, is not trained again. Test runs of one seed and question are collected once all of them have ended, so that they
are of one machine.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from experiments import evidence
from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.files import record
from pc_recipe.files.atomic import write_atomically
from pc_recipe.runs.sweep.spec import SWEEPS

FOLDER = Path("experiments/initialisation")
TOMLS = Path("outputs/initialisation")
CONFIGS = {
    "tuning": "conditioning/configs/conditioning_adamw.toml",
    "20": "conditioning/configs/conditioning_adamw.toml",
    "80": "conditioning/configs/conditioning_adamw_80.toml",
    "40": "verdict/configs/adamw_40.toml",
}
"""{study: config}; the last three by tokens per parameter."""
TUNING_SEEDS, TEST_SEEDS = (1, 2), range(31, 39)

Settings = dict[str, Any]
Cell = tuple[int, ...]
"""Where a setting stands in a grid: its place on each axis."""

LR = "optimizer.lr"
RATES = [2.828e-3, 4e-3, 5.657e-3, 8e-3, 1.131e-2, 1.6e-2, 2.263e-2, 3.2e-2, 4.525e-2]
BEST = RATES.index(1.131e-2)  # of the baseline and of level 4, by the tuning of the verdict
INIT_FACTORS, RATE_FACTORS = [0.9, 1.3, 1.7, 2.4, 3.4, 4.8], [0.9, 1.3, 2.1, 3.0, 4.2, 6.0]
STRENGTHS, KEEP_NORM = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2], [False, True]

BASELINE: Settings = {"pc.enable": False, LR: RATES[BEST]}
LEVEL_4: Settings = {"pc.enable": True, "pc.level": 4, LR: RATES[BEST]}
MUON: Settings = {"pc.enable": False, "optimizer.name": "Muon", LR: 4.525e-2, "optimizer.weight_decay": 3.87e-3}
MUONH_LEVEL_2: Settings = {
    "pc.enable": True,
    "pc.level": 2,
    "optimizer.name": "MuonH",
    "optimizer.hyperball_lr": 2e-2,
    LR: RATES[BEST],
}
LONG_WARMUP: Settings = {"lr_scheduler.warmup_steps": 120}


@dataclass(frozen=True)
class Run:
    study: str
    arm: str
    seed: int
    settings: Settings

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.study, self.arm, self.settings[LR], self.seed

    @property
    def name(self) -> str:
        """Of its sweep, which has no other run."""
        return "initialisation_{}_{}_{:g}_{}".format(*self.key)

    @property
    def has_ended(self) -> bool:
        """Whether its sweep has its result, which comes a moment after the run's last state."""
        return bool(record.read(SWEEPS / self.name / "results.jsonl", dict[str, Any]))


Losses = dict[tuple[str, str, float, int], float]
"""{key of a collected run: its final loss}; infinite if it diverged."""


@dataclass(frozen=True)
class Group:
    """Runs that are collected together; not before their last has been determined."""

    runs: list[Run]
    is_whole: bool = True


def plan(losses: Losses) -> list[Group]:
    """What is to be trained, as far as the losses so far determine it, the most urgent first."""
    groups: list[Group] = []

    def best(make: Callable[[Cell], tuple[str, Settings]], start: Iterable[Cell], shape: Sequence[int]) -> Cell | None:
        cell, needed = search(losses, make, list(start), shape)
        groups.extend(Group([run]) for run in needed)
        return cell

    def at_best_rate(arm: str, settings: Settings, about: int) -> tuple[Settings | None, int]:
        shape = [len(RATES)]
        cell = best(lambda cell: (arm, settings | {LR: RATES[cell[0]]}), _with_neighbours((about,), shape), shape)
        return (None, about) if cell is None else (settings | {LR: RATES[cell[0]]}, cell[0])

    def test(study: str, arms: dict[str, Settings | None]) -> None:
        for seed in TEST_SEEDS:
            runs = [Run(study, arm, seed, settings) for arm, settings in arms.items() if settings is not None]
            if _missing(losses, runs):
                groups.append(Group(runs, None not in arms.values()))

    # 1. scale
    scale = scale_pc = None
    cell = best(scaled, itertools.product((1, 2, 3), (1, 2, 3)), [len(INIT_FACTORS), len(RATE_FACTORS)])
    if cell is not None:
        arm, settings = scaled(cell)
        scale, about = at_best_rate(arm, settings, BEST)
        if scale is not None:
            scale_pc, _ = at_best_rate(f"{arm}-level-4", settings | LEVEL_4, about)
    test("20", {"baseline": BASELINE, "level-4": LEVEL_4, "scale": scale, "scale-level-4": scale_pc})
    # 2. length
    test("80", {"baseline": BASELINE, "level-4": LEVEL_4})
    # 3. retraction
    retraction = None
    cell = best(retracted, itertools.product((2, 3, 4), (0, 1)), [len(STRENGTHS), len(KEEP_NORM)])
    if cell is not None:
        retraction, _ = at_best_rate(*retracted(cell), BEST)
    test("20", {"retraction": retraction})
    # 4. the rest
    test("40", {"muon": MUON, "MuonH-level-2": MUONH_LEVEL_2})
    test("20", {"warmup-10": BASELINE | LONG_WARMUP, "level-4-warmup-10": LEVEL_4 | LONG_WARMUP})
    return groups


def scaled(cell: Cell) -> tuple[str, Settings]:
    """Arm and settings: factors of the first weights and of the rate of o and FFN."""
    init, rate = INIT_FACTORS[cell[0]], RATE_FACTORS[cell[1]]
    factors = {"model.init_factors": {"o": init, "ffn": init}, "optimizer.lr_factors": {"o": rate, "ffn": rate}}
    return f"scale-{init}-{rate}", BASELINE | factors


def retracted(cell: Cell) -> tuple[str, Settings]:
    """Arm and settings of a retraction."""
    options = {"strength": STRENGTHS[cell[0]], "keep_norm": KEEP_NORM[cell[1]]}
    arm = "retract-{strength:g}".format(**options) + ("-norm" if options["keep_norm"] else "")
    return arm, BASELINE | {"experiment.arm": "experiments.verdict.arms:Retract", "experiment.options": options}


def search(
    losses: Losses, make: Callable[[Cell], tuple[str, Settings]], start: list[Cell], shape: Sequence[int]
) -> tuple[Cell | None, list[Run]]:
    """The best cell of a grid, or None and the runs that are needed before another decision.

    The first seed of all cells at the start; the other of the four best. The lowest mean is best, once all neighbours that the
    grid has were tried; those outside of the start are tried on both seeds.

    Args:
        make: arm and settings of a cell.
        shape: length of each axis of the grid.
    """

    def runs(cells: Iterable[Cell], seeds: Sequence[int]) -> list[Run]:
        return [Run("tuning", arm, seed, settings) for seed in seeds for arm, settings in map(make, cells)]

    def mean(cell: Cell, seeds: Sequence[int]) -> float:
        return sum(losses[run.key] for run in runs([cell], seeds)) / len(seeds)

    if needed := _missing(losses, runs(start, TUNING_SEEDS[:1])):
        return None, needed
    tried, compared = set(start), sorted(start, key=lambda cell: mean(cell, TUNING_SEEDS[:1]))[:4]
    while True:
        if needed := _missing(losses, runs(compared, TUNING_SEEDS)):
            return None, needed
        best = min(compared, key=lambda cell: mean(cell, TUNING_SEEDS))
        if not (new := [cell for cell in _with_neighbours(best, shape) if cell not in tried]):
            return best, []
        tried |= set(new)
        compared = compared + new


def _with_neighbours(cell: Cell, shape: Sequence[int]) -> list[Cell]:
    """A cell, and those one step away along an axis of the grid."""
    steps = [(axis, step) for axis in range(len(cell)) for step in (-1, 1)]
    near = [(*cell[:axis], cell[axis] + step, *cell[axis + 1 :]) for axis, step in steps]
    return [cell, *(one for one in near if all(0 <= i < n for i, n in zip(one, shape, strict=True)))]


def _missing(losses: Losses, runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.key not in losses]


def read_losses() -> Losses:
    """Those of the collected rows."""
    losses: Losses = {}
    for row in record.read(FOLDER / "runs.jsonl", dict[str, Any]) or []:
        config = row["resolved"]
        key = row["study"], row["variant"], config["optimizer"]["lr"], config["debug"]["seed"]
        losses[key] = evidence.final_loss(row)
    return losses


def collect() -> list[Run]:
    """Add the rows of groups that have ended, and return the runs that are next."""
    while True:
        groups = plan(read_losses())
        ended = [group.runs for group in groups if group.is_whole and all(run.has_ended for run in group.runs)]
        if not ended:
            return [run for group in groups for run in group.runs if not run.has_ended]
        for runs in ended:
            evidence.collect([SWEEPS / run.name for run in runs], runs[0].study, FOLDER)
            print(f"collected: {', '.join(run.name for run in runs)}", flush=True)


def start(run: Run) -> subprocess.Popen:
    file = TOMLS / f"{run.name}.toml"
    config = os.path.relpath(Path("experiments") / CONFIGS[run.study], TOMLS)
    sweep = {"configs": [config], "seeds": [run.seed], "variants": {run.arm: run.settings}}
    write_atomically(file, tomli_w.dumps(sweep))
    return subprocess.Popen([sys.executable, "scripts/sweep.py", "run", str(file)])


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("number", type=int, help="runs at a time; 0: only collect")
    number = parser.parse_args().number
    os.environ["OMP_NUM_THREADS"] = "1"
    os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    running: dict[str, subprocess.Popen] = {}
    try:
        todo = collect()
        print(
            f"{len(todo)} runs are known to be missing; next: {', '.join(run.name for run in todo[:4]) or None}",
            flush=True,
        )
        while number:
            for run in todo:
                if len(running) < number and run.name not in running:
                    running[run.name] = start(run)
            if not running:
                return
            while not (ended := [name for name, process in running.items() if process.poll() is not None]):
                time.sleep(2)
            for name in ended:
                del running[name]
            todo = collect()
            if failed := [run.name for run in todo if run.name in ended]:
                raise UserError(f"{failed[0]} did not finish; its train.log says why. Repeat the command to retry it")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


if __name__ == "__main__":
    main()
