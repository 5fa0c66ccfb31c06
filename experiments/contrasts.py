"""The tests that an experiment's plan.toml fixed before the first run, applied to its runs."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field
from scipy import stats

from pc_recipe.config.inheritance import resolve
from pc_recipe.config.sections import Positive, Section, Text, key
from pc_recipe.files import look
from pc_recipe.pages import markdown

Contrast = Annotated[list[Text], Field(min_length=2, max_length=2)]


class Question(Section):
    """Contrasts that answer one question together."""

    name: Text = key("", "The question, in a word.")
    contrasts: list[Contrast] = key([], "[arm, arm to subtract], for each row.")
    holm: bool = key(False, "Correct p for the number of rows (Holm); leave off for a claim that needs all of them.")


class Preregistration(Section):
    """The keys of plan.toml."""

    margin: Positive = key(0.008, 'Nats: an interval inside +- margin says "no difference".')
    tuning_seeds: list[int] = key([], "Seeds that choose the rates; empty: the first seed.")
    test_seeds: list[int] = key([], "Seeds that are tested; empty: all that chose no rate.")
    questions: list[Question] = key([], "What is tested.")
    paired: bool = key(True, "Compare by seed (Student); false: the means of two groups of seeds (Welch).")
    shared_runs: list[Text] = key([], "Others' runs.jsonl; their runs of the same model and steps become arms too.")


def read_preregistration(folder: Path) -> Preregistration:
    """Read `folder`/plan.toml; without one, the defaults."""
    file = folder / "plan.toml"
    return resolve(file, [], Preregistration) if look.is_file(file) else Preregistration()


def contrast_table(runs: pd.DataFrame, preregistration: Preregistration) -> str:
    """A row for each planned contrast with two tested seeds or more in both arms; "" if there is none.

    Holm's correction counts all planned rows of a question, also one that did not run or cannot be tested because a run
    diverged.

    Args:
        runs: of one experiment (`evidence.Experiment.runs`).
    """
    losses = runs[runs.best & ~runs.chose].pivot(index="seed", columns="arm", values="loss")
    rows = []
    for question in preregistration.questions:
        samples = [_samples(losses, arm, other, preregistration.paired) for arm, other in question.contrasts]
        tests = [compare_means(*sample, preregistration.paired) for sample in samples]
        corrected = holm([1.0 if test is None else test.pvalue for test in tests])
        for (arm, reference), sample, test, p in zip(question.contrasts, samples, tests, corrected):
            if min(map(len, sample)) > 1:
                counts = dict.fromkeys(map(len, sample)) if preregistration.paired else map(len, sample)
                cells = _cells(*sample, test, p if question.holm else None, preregistration.margin)
                rows.append([question.name, f"{arm} - {reference}", ", ".join(map(str, counts)), *cells])
    header = "question|contrast|seeds|difference|95 % interval|p|p by Holm|verdict"
    return markdown.table(header.split("|"), rows) if rows else ""


def _samples(losses: pd.DataFrame, arm: str, reference: str, paired: bool) -> tuple[pd.Series, pd.Series]:
    """Final losses of both arms, infinite where a run diverged; if `paired`, of the seeds that ran in both."""
    both = losses.reindex(columns=[arm, reference])
    both = both.dropna() if paired else both
    return both[arm].dropna(), both[reference].dropna()


def compare_means(arm: pd.Series, reference: pd.Series, paired: bool) -> Any:
    """Student's test of differences by seed, or Welch's; None if a run diverged or a sample has fewer than two losses."""
    if min(len(arm), len(reference)) < 2 or not np.isfinite([*arm, *reference]).all():
        return None
    return stats.ttest_rel(arm, reference) if paired else stats.ttest_ind(arm, reference, equal_var=False)


def _cells(arm: pd.Series, reference: pd.Series, test: Any, corrected: float | None, margin: float) -> list[str]:
    """Mean, interval, p, p by Holm and verdict."""
    interval, verdict = interval_and_verdict(test, margin, corrected)
    if test is None:
        diverged = {*arm.index[~np.isfinite(arm)], *reference.index[~np.isfinite(reference)]}
        return [f"{len(diverged)} of {len({*arm.index, *reference.index})} diverged", interval, "-", "-", verdict]
    by_holm = "-" if corrected is None else f"{corrected:.2g}"
    return [f"{arm.mean() - reference.mean():+.4f}", interval, f"{test.pvalue:.2g}", by_holm, verdict]


def interval_and_verdict(test: Any, margin: float, corrected: float | None = None) -> tuple[str, str]:
    """The 95 % interval of a difference, and its verdict: lower, higher, no difference (inside ±`margin`) or undecided; "no
    test" if `test` is None.

    Args:
        test: the result of `compare_means`.
        corrected: p by Holm; if given, it decides in place of the test's own p.
    """
    if test is None:
        return "-", "no test"
    low, high = test.confidence_interval(0.95)
    verdict = "undecided"
    if (test.pvalue if corrected is None else corrected) < 0.05:
        verdict = "lower" if test.statistic < 0 else "higher"
    elif max(-low, high) < margin:
        verdict = "no difference"
    return f"{low:+.4f} to {high:+.4f}", verdict


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the smallest of n p-values times n, the next times n - 1, and so on; non-decreasing, at most 1."""
    order = np.argsort(p_values)
    scaled = np.array(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()
