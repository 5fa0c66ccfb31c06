"""The test that an experiment's plan.toml wrote down before the first run, applied to its runs."""

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field
from scipy import stats

from pc_recipe.config.inheritance import resolve
from pc_recipe.config.sections import Positive, Section, Text, key
from pc_recipe.files import markdown

Contrast = Annotated[list[Text], Field(min_length=2, max_length=2)]


class Question(Section):
    """Contrasts that answer one question together."""

    name: Text = key("", "The question, in a word.")
    contrasts: list[Contrast] = key([], "[arm, arm that is subtracted] of each row.")
    holm: bool = key(False, "Correct for the number of rows (Holm); not for a claim that needs all of them.")


class Preregistration(Section):
    """The keys of plan.toml."""

    margin: Positive = key(0.008, 'Nats: an interval inside +- margin says "no difference".')
    tuning_seeds: list[int] = key([], "Seeds that choose the rates; empty: the first.")
    questions: list[Question] = key([], "What is tested.")


def read_preregistration(folder: Path) -> Preregistration:
    """`folder`/plan.toml; the defaults without one."""
    file = folder / "plan.toml"
    return resolve(file, [], Preregistration) if file.is_file() else Preregistration()


def contrast_table(runs: pd.DataFrame, preregistration: Preregistration) -> str:
    """A row for each planned contrast whose arms both ran on two seeds or more that chose no rate; "" without one.

    Args:
        runs: of one experiment (`evidence.Experiment.runs`).
    """
    losses = runs[runs.best & ~runs.chose].pivot(index="seed", columns="arm", values="loss")
    rows = []
    for question in preregistration.questions:
        names = [pair for pair in question.contrasts if set(pair) <= set(losses)]
        differences = [(losses[arm] - losses[reference]).dropna() for arm, reference in names]
        tests = [(pair, some) for pair, some in zip(names, differences) if len(some) > 1 and np.isfinite(some).all()]
        p_values = [stats.ttest_1samp(some, 0).pvalue for _, some in tests]
        for ((arm, reference), some), p, corrected in zip(tests, p_values, holm(p_values), strict=True):
            low, high = stats.t.interval(0.95, len(some) - 1, some.mean(), some.sem())
            decides = corrected if question.holm else p
            verdict = "undecided"
            if decides < 0.05:
                verdict = "lower" if some.mean() < 0 else "higher"
            elif max(-low, high) < preregistration.margin:
                verdict = "no difference"
            interval = f"{low:+.4f} to {high:+.4f}"
            cells = [f"{some.mean():+.4f}", interval, f"{p:.2g}", f"{corrected:.2g}" if question.holm else "-"]
            rows.append([question.name, f"{arm} - {reference}", str(len(some)), *cells, verdict])
    header = "question|contrast|seeds|difference|95 % interval|p|p by Holm|verdict"
    return markdown.table(header.split("|"), rows) if rows else ""


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the smallest of n times n, the next times n - 1, and so on, never falling; at most 1."""
    order = np.argsort(p_values)
    scaled = np.array(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()
