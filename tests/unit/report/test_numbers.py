"""Pages quote the current rows: each number is computed again, and each figure records the rows from which it was drawn."""

import pytest
from PIL import Image
from scipy import stats

from experiments import numbers, pages, summary
from experiments.evidence import digest
from experiments.power import detected, powers
from helpers.tiny import ROOT
from pc.errors import UserError

COMPLETE = (
    "README.md",
    "docs/comparing.md",
    "docs/performance.md",
    "docs/should-i.md",
    "experiments/verdict/README.md",
)
FIGURES = sorted(ROOT.glob("experiments/**/*.png"))


@pytest.mark.parametrize("page", pages.pages(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_page_has_the_numbers_of_its_rows(page):
    """To renew them: python -m experiments pages."""
    text = page.read_text()
    assert pages.renewed(text) == text


@pytest.mark.parametrize("page", COMPLETE)
def test_a_number_has_a_mark_or_the_name_of_its_source(page):
    assert pages.unmarked((ROOT / page).read_text()) == []


@pytest.fixture
def made(monkeypatch):
    """Names of made-up numbers in place of the rows."""
    names = {"gain": numbers.Estimate(0.0512, 0.042, 0.0601), "table": lambda: "| a |\n|---|\n| 1 |\n", "tiny": 6.62e-7}
    monkeypatch.setattr(pages, "NAMES", names)


PAGE = "It gains 0.051 (0.042 to 0.060)<!--gain:.3f-->, or 6.6e-7<!--tiny:.1e-->.\n\n<!--table()-->\n| a |\n|---|\n| 1 |\n\nEnd."


@pytest.mark.parametrize(
    "changed", [PAGE, *(PAGE.replace(*pair) for pair in (("0.051", "0.151"), ("0.060)", "9.06)"), ("6.6e-7", "6.6e-17"))),
                PAGE.replace("| 1 |", "| 2 |\n| 3 |"), PAGE.replace("| a |\n|---|\n| 1 |\n", "")]
)  # fmt: skip
def test_a_changed_number_or_table_is_written_again(made, changed):
    assert pages.renewed(changed) == PAGE


def test_a_mark_that_no_number_precedes_is_refused(made):
    with pytest.raises(UserError, match="before it should stand 0.051 .*, not It gains"):
        pages.renewed("It gains a lot<!--gain:.3f-->.")


def test_a_number_without_a_mark_is_found(made):
    text = PAGE + " It was 0.14.\n\nThe paper: 0.15.<!--given: the paper-->\n\nAt rate 1.131e-2 [0.16](a0.17) `0.18`."
    assert pages.unmarked(text) == ["0.14", "0.16"]
    assert pages.unmarked("| a | b<!--given: settings--> |\n|---|---|\n| 0.11 | 1 |\n\n| c |\n| 0.12 |") == ["0.12"]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda file: file.stem)
def test_a_figure_is_as_new_as_its_rows(figure):
    """To renew one: python -m experiments report FOLDER, or experiments.summary, or experiments.verdict.dial."""
    rows = summary.rows() if figure.stem == "summary" else digest(figure.parent)
    assert Image.open(figure).text["Rows"] == rows


def test_adamw_needs_twice_the_tokens_for_its_own_loss_at_twice_the_tokens():
    studies = numbers.studies()
    c, a, b = numbers.loss_curve()
    losses = [studies[f"verdict-{t}"]["baseline"].mean for t in (5, 20, 40)]
    assert [c + a * t**-b for t in (5, 20, 40)] == pytest.approx(losses, abs=1e-9)
    gain = type("Gain", (), {"mean": losses[2] - losses[1]})
    assert numbers.adamw_tokens(gain) == pytest.approx(2, abs=1e-9)


def test_a_share_of_the_baseline_itself_draws_it_once():
    """So (baseline - level 4) / (baseline - level 4) is 1 in every draw."""
    assert f"{numbers.studies()['cell-20'].share('level-4', 'baseline'):.3f}" == "1.000 (1.000 to 1.000)"


def test_two_one_sided_tests():
    study = numbers.studies()["adamw"]
    tested, runs = study["pc on - pc off"], study.experiment.runs
    losses = runs[runs.best & ~runs.chose].pivot(index="seed", columns="arm", values="loss")
    differences = losses["pc on"] - losses["pc off"]
    below = stats.ttest_1samp(differences, 0.008, alternative="less").pvalue
    above = stats.ttest_1samp(differences, -0.008, alternative="greater").pvalue
    assert tested.p_outside(0.008) == pytest.approx(max(below, above), rel=1e-6)


def test_what_a_plan_can_find():
    """By the textbook for equal spreads: t, of 18 degrees of freedom, times sqrt(2 / 10); about (t + t of 80 %) times it."""
    half, found, _ = powers((1.0, 1.0), seeds=10, margin=1.0)
    assert half == pytest.approx(2.101 * 0.2**0.5 * 0.987, rel=0.02)  # the mean of an estimated spread is 1.3 % too low
    assert found == pytest.approx((2.101 + 0.862) * 0.2**0.5, rel=0.02)
    assert detected((1.0, 1.0), seeds=10, difference=found) == pytest.approx(0.8, abs=1e-4)
    said = [powers((1.0, 1.0), seeds=10, margin=margin)[2] for margin in (0.5, 1.0, 4.0)]
    assert said[0] < 0.01 < 0.05 < said[1] < said[2]
    assert said[2] == pytest.approx(0.95, abs=0.005)  # in 5 % of cases equal methods are "lower" or "higher"
