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
    test_seeds: list[int] = key([], "Seeds that are tested; empty: all that chose no rate.")
    questions: list[Question] = key([], "What is tested.")
    shared_runs: list[Text] = key([], "runs.jsonl of others, whose runs of the same model and steps are arms too.")


def read_preregistration(folder: Path) -> Preregistration:
    """`folder`/plan.toml; the defaults without one."""
    file = folder / "plan.toml"
    return resolve(file, [], Preregistration) if file.is_file() else Preregistration()


def contrast_table(runs: pd.DataFrame, preregistration: Preregistration) -> str:
    """A row for each planned contrast whose arms both ran on two seeds or more that are tested; "" without one.

    Holm's correction is for all planned rows of a question: one that did not run, or cannot be tested because a run
    diverged, counts too.

    Args:
        runs: of one experiment (`evidence.Experiment.runs`).
    """
    losses = runs[runs.best & ~runs.chose].pivot(index="seed", columns="arm", values="loss")
    rows = []
    for question in preregistration.questions:
        differences = [_differences(losses, *contrast) for contrast in question.contrasts]
        p_values = [stats.ttest_1samp(some, 0).pvalue if _can_be_tested(some) else 1.0 for some in differences]
        for (arm, reference), some, p, corrected in zip(question.contrasts, differences, p_values, holm(p_values)):
            if len(some) > 1:
                cells = _cells(some, p, corrected if question.holm else None, preregistration.margin)
                rows.append([question.name, f"{arm} - {reference}", str(len(some)), *cells])
    header = "question|contrast|seeds|difference|95 % interval|p|p by Holm|verdict"
    return markdown.table(header.split("|"), rows) if rows else ""


def _differences(losses: pd.DataFrame, arm: str, reference: str) -> pd.Series:
    """Of the seeds that ran in both; not finite where one diverged."""
    both = losses.reindex(columns=[arm, reference]).dropna()
    return both[arm] - both[reference]


def _can_be_tested(differences: pd.Series) -> bool:
    return len(differences) > 1 and bool(np.isfinite(differences).all())


def _cells(differences: pd.Series, p: float, corrected: float | None, margin: float) -> list[str]:
    """Mean, interval, p, p by Holm and verdict."""
    if not _can_be_tested(differences):
        return [f"{(~np.isfinite(differences)).sum()} of {len(differences)} diverged", "-", "-", "-", "no test"]
    mean = differences.mean()
    low, high = stats.t.interval(0.95, len(differences) - 1, mean, differences.sem())
    verdict = "undecided"
    if (p if corrected is None else corrected) < 0.05:
        verdict = "lower" if mean < 0 else "higher"
    elif max(-low, high) < margin:
        verdict = "no difference"
    by_holm = "-" if corrected is None else f"{corrected:.2g}"
    return [f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", f"{p:.2g}", by_holm, verdict]


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the smallest of n times n, the next times n - 1, and so on, never falling; at most 1."""
    order = np.argsort(p_values)
    scaled = np.array(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()
