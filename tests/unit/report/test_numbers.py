"""Pages quote the current rows: each number is computed again, and each figure records the rows from which it was drawn."""

import re
from functools import cache

import pytest
from PIL import Image

from experiments import numbers
from experiments.contrasts import contrast_table, read_preregistration
from experiments.evidence import digest
from experiments.power import powers
from experiments.verdict.dial import BASE, CELLS, share
from helpers.tiny import ROOT

PAGES = ("README.md", "docs/conditioning.md", "docs/evidence.md", "docs/should-i.md")
quoted_texts = cache(numbers.of_pages)


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_numbers_of_its_rows(page):
    text = words(page)
    assert not [quoted for quoted in quoted_texts()[page] if quoted not in text]


@pytest.mark.parametrize("page", PAGES[2:])
def test_a_page_has_no_other_number(page):
    """Without the quoted texts, a page has no number with two decimals or more, as losses have."""
    text = words(page)
    for quoted in sorted(quoted_texts()[page], key=len, reverse=True):
        text = text.replace(quoted, "")
    assert not re.findall(r".{0,20}\d\.\d\d.{0,10}", text)


@pytest.mark.parametrize(
    "study, folder, lines",
    [
        ("cell-20", "conditioning", 8),
        ("rivals", "rivals", 8),
        ("rivals-again", "rivals/again", 8),
        ("verdict-20", "verdict", 10),
        ("verdict-5", "verdict", 9),
        ("verdict-cells", "verdict", 10),
        ("verdict-recovery", "verdict", 3),
        ("verdict-40", "verdict", 4),
    ],
)
def test_the_tables_of_a_page_are_reproduced(study, folder, lines):
    """From the choice of rates by the plan's tuning seeds to Holm's correction, also with runs that two studies share."""
    plan = read_preregistration(ROOT / "experiments" / folder)
    table = contrast_table(numbers.studies()[study].experiment.runs, plan)
    page = ROOT / "experiments" / folder.removesuffix("/again") / "README.md"
    assert len(table.splitlines()) == lines and table.strip() in page.read_text()


@pytest.mark.parametrize(
    "page, study, arms, control",
    [
        ("experiments/verdict/README.md", "5", ("dial-0.33", "dial-0.54", "dial-0"), "dial-1"),
        ("experiments/verdict/README.md", "cells", CELLS.values(), BASE),
        ("docs/should-i.md", "cells", CELLS.values(), BASE),
        ("README.md", "cells", (CELLS["x"], CELLS["y"]), BASE),
    ],
)
def test_a_page_has_the_shares_of_pcs_gain(page, study, arms, control):
    shares = [share(numbers.studies()[f"verdict-{study}"], arm, control) for arm in arms]
    assert not [text for text in shares if text not in words(page)]


@pytest.mark.parametrize("figure", sorted(ROOT.glob("experiments/**/*.png")), ids=lambda file: file.stem)
def test_a_figure_is_as_new_as_its_rows(figure):
    """To renew one: python -m experiments report FOLDER."""
    assert Image.open(figure).text["Rows"] == digest(figure.parent)


def test_what_a_plan_can_find():
    """By the textbook for equal spreads: t, of 18 degrees of freedom, times sqrt(2 / 10); about (t + t of 80 %) times it."""
    half, found, inside = powers((1.0, 1.0), seeds=10, margin=1.0)
    assert half == pytest.approx(2.101 * 0.2**0.5 * 0.987, rel=0.02)  # the mean of an estimated spread is 1.3 % too low
    assert found == pytest.approx((2.101 + 0.862) * 0.2**0.5, rel=0.02)
    assert (
        powers((1.0, 1.0), seeds=10, margin=0.5)[2] < 0.01 < 0.05 < inside < powers((1.0, 1.0), seeds=10, margin=2.0)[2]
    )
