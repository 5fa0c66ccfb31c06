"""Choose each arm's rate from its tuning runs, and write the file that the tests' sweeps name as their parent.

python -m experiments.verdict.choose outputs/sweeps/verdict_a_tune_* outputs/sweeps/verdict_more_* --output outputs/verdict/rates.toml

The best rate has the lowest mean final loss over seeds 1 and 2; a run that diverged counts as infinite. If it is the lowest
or highest that ran, none is chosen for that arm: a sweep with the next rate is written, to be run and named here too. Nor is
one chosen while a rate lacks one of the two seeds.
"""

import argparse
import math
import tomllib
from pathlib import Path

import pandas as pd
import tomli_w

from pc.command import exit_on_user_error
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.runs.sweep.points import read_results

SEEDS = [1, 2]
OUTPUT = Path("outputs/verdict")
STUDY = "../../experiments/verdict"
LENGTH, RATE = "optimizer.hyperball_lr", "optimizer.lr"


def read(folders: list[Path]) -> pd.DataFrame:
    """A row for each tuning run: config, arm, its rate and loss, and the settings that are its rates."""
    rows = []
    for result in (result for folder in folders for result in read_results(folder)):
        rates = {key: result["settings"][key] for key in (RATE, LENGTH) if key in result["settings"]}
        loss = math.inf if result[VALIDATION] is None else result[VALIDATION]
        row = {"config": Path(result["config"]).name, "arm": result["variant"], "seed": result["seed"], "loss": loss}
        rows.append(row | {"rate": rates.get(LENGTH, rates.get(RATE)), "rates": rates})
    runs = pd.DataFrame(rows)
    return runs[runs.seed.isin(SEEDS)].drop_duplicates(["arm", "rate", "seed"])


def next_rate(means: pd.Series) -> float | None:
    """From mean losses sorted by rate: the next rate beyond the end that is best; None if the best is not an end."""
    best = means.idxmin()
    factors = [factor for end, factor in ((means.index[0], 0.5), (means.index[-1], 2.0)) if best == end]
    return float(f"{best * math.sqrt(factors[0]):.4g}") if factors else None


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders of tuning sweeps")
    parser.add_argument("--output", type=Path, default=OUTPUT / "rates.toml", help="default: %(default)s")
    arguments = parser.parse_args()
    runs = read(arguments.folders)
    arms = tomllib.loads(Path("experiments/verdict/sweeps/arms.toml").read_text())["arms"]
    for (config, arm), of_arm in runs.groupby(["config", "arm"], sort=False):
        losses = of_arm.pivot(index="rate", columns="seed", values="loss").reindex(columns=SEEDS)
        means = losses.mean(axis=1, skipna=False)
        print(f"{arm}: " + ", ".join(f"{rate:.4g} {loss:.4f}" for rate, loss in means.items()))
        if means.isna().any():
            print("  not chosen: a rate lacks a seed; finish the tuning sweeps first")
            continue
        rates = of_arm[of_arm.rate == means.idxmin()].rates.iloc[0]
        if (beyond := next_rate(means)) is None:
            arms[arm] |= rates
            print(f"  best: {means.idxmin():.4g}")
            continue
        rates = rates | {LENGTH if LENGTH in rates else RATE: beyond}
        file = OUTPUT / f"verdict_more_{arm}_{beyond:.4g}.toml"
        sweep = {"parent": f"{STUDY}/sweeps/arms.toml", "configs": [f"{STUDY}/configs/{config}"], "seeds": SEEDS}
        write_atomically(file, tomli_w.dumps(sweep | {"variants": {arm: rates}}))
        print(f"  not chosen: the best rate is an end of the grid; next: experiments/verdict/run.sh 2 {file}")
    write_atomically(arguments.output, tomli_w.dumps({"arms": arms}))
    print(arguments.output)


if __name__ == "__main__":
    main()
