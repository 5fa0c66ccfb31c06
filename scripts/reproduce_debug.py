"""Every table and figure of the paper at debug size, with the commands of docs/reproduce.md.

Usage: python scripts/reproduce_debug.py [ROW...] [--evals DIR]

Takes under half an hour on two busy cores (26:41 minutes). A row makes the data and trains the runs that it needs. Repeat to
continue: finished runs and scores are kept. Output goes to outputs/reproduce. Figures at this size mean nothing; for the paper's, use the same commands with its
configs.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from pc.command import exit_on_user_error
from pc_recipe.files import look

ROOT = Path(__file__).parents[1]
OUT = "outputs/reproduce"
CONFIGS = "train_configs/reproduce"
SWEEPS = ["main", "adamw_lr", "muon_lr", "pc_level", "pc_blocks", "recovery_gamma", "polar_express", "no_gamma"]
MAIN = {name: f"{OUT}/main/{name}" for name in ("adamw_baseline", "adamw_pc", "muon_baseline", "muon_pc")}
ADAMW, MUON = ([MAIN[f"{name}_baseline"], MAIN[f"{name}_pc"]] for name in ("adamw", "muon"))
BASELINES = [MAIN["adamw_baseline"], MAIN["muon_baseline"]]
LAST = "checkpoint/step-12"
YES_NO = ("true", "false")


def sweeps(*names: str) -> list[str]:
    return [f"{CONFIGS}/{name}.toml" for name in names]


DATA = ["-m", "pc_recipe.data.demo"]


def trained(*names: str) -> list[list[str]]:
    """The commands that make a row's runs."""
    return [DATA, *(["scripts/sweep.py", "run", *sweeps(name)] for name in names)]


def bars(name: str, *baselines: str) -> list[str]:
    return ["scripts/report.py", *baselines, "--sweep", f"{OUT}/{name}", "--output", f"{OUT}/figures/{name}.html"]


def rows(evals: str) -> dict[str, list[list[str]]]:
    """{row of the table in docs/reproduce.md: its commands, as arguments of `python`}."""
    models = [f"{name}={folder}/{LAST}" for name, folder in MAIN.items()]
    return {
        "data": [DATA, ["scripts/inspect_data.py", "data/demo"]],
        "runs": [
            ["scripts/sweep.py", "plan", *sweeps(*SWEEPS)],
            *trained(*SWEEPS),
            ["scripts/sweep.py", "select", *sweeps("adamw_lr", "muon_lr", "pc_level", "pc_blocks")],
            ["scripts/sweep.py", "select", *sweeps("recovery_gamma", "polar_express", "no_gamma")],
        ],
        "maps": [["scripts/polynomials.py", "--output", f"{OUT}/figures/maps"]],
        "model-table": [["scripts/dry_run.py", f"{CONFIGS}/adamw_pc.toml", "--world-size", "1", "--no-data"]],
        "loss-adamw": [*trained("main"), ["scripts/report.py", *ADAMW, "--output", f"{OUT}/figures/loss-adamw.html"]],
        "loss-muon": [*trained("main"), ["scripts/report.py", *MUON, "--output", f"{OUT}/figures/loss-muon.html"]],
        "spectra-adamw": [*trained("main"), ["scripts/spectra.py", *ADAMW, "--output", f"{OUT}/figures/spectra-adamw"]],
        "spectra-muon": [*trained("main"), ["scripts/spectra.py", *MUON, "--output", f"{OUT}/figures/spectra-muon"]],
        "levels": [*trained("main", "pc_level"), bars("pc_level", *BASELINES)],
        "blocks": [*trained("main", "pc_blocks"), bars("pc_blocks", *BASELINES)],
        "recovery": [
            *trained("main", "recovery_gamma"),
            bars("recovery_gamma", MAIN["adamw_baseline"]),
            ["scripts/report.py", MAIN["adamw_baseline"]]
            + [f"{OUT}/recovery_gamma/norm_recovery-{r}_learnable_gamma-{g}" for r in YES_NO for g in YES_NO]
            + ["--output", f"{OUT}/figures/recovery.html"],
        ],
        "gamma-spikes": [
            *trained("main", "no_gamma"),
            ["scripts/report.py", MAIN["adamw_pc"], f"{OUT}/no_gamma/learnable_gamma-false"]
            + ["--output", f"{OUT}/figures/gamma-spikes.html"],
        ],
        "flattening": trained("main", "polar_express")
        + [
            ["scripts/report.py", *pair, f"{OUT}/polar_express/{name}_pc/level-polar-express"]
            + ["--output", f"{OUT}/figures/flattening-{name}.html"]
            for name, pair in (("adamw", ADAMW), ("muon", MUON))
        ],
        "estimator": [*trained("main"), ["scripts/report.py", *ADAMW, "--output", f"{OUT}/figures/estimator.html"]],
        "cost": [
            ["scripts/cost.py", f"train_configs/1b_{name}_pc.toml", "--output", f"{OUT}/figures/cost-{name}"]
            for name in ("adamw", "muon")
        ],
        "memory": [
            ["benchmarks/step.py", row, "--flavor", "debug", "--seq-len", "16", "--local-batch-size", "1"]
            + ["--micro-batches", "2", "--rounds", "1", "--output", f"{OUT}/figures/memory"]
            for row in ("memory", "memory-muon")
        ],
        "theorem": [["scripts/theorem.py"]],
        "scores": [
            *trained("main"),
            *([] if look.is_folder(evals) else [["scripts/fetch_eval_data.py", evals]]),
            ["scripts/score.py", *models, "--data", evals, "--limit", "2", "--output", f"{OUT}/figures/scores"],
        ],
    }


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(rows(''))} (default: all)")
    parser.add_argument("--evals", default=f"{OUT}/evals", help="folder of scripts/fetch_eval_data.py (default: new)")
    arguments = parser.parse_args()
    every, done = rows(arguments.evals), []
    for name in arguments.rows or every:
        if name not in every:
            parser.error(f"no row {name!r}; rows are {', '.join(every)}")
        start = time.monotonic()
        for command in every[name]:
            if command in done:
                continue
            done.append(command)
            print(f"\n$ python {' '.join(command)}", flush=True)
            if subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
                sys.exit(f"row {name} failed at: python {' '.join(command)}")
        print(f"row {name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
