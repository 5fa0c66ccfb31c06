import pytest
import torch

from pc.maps import COEFFICIENTS, evaluate
from pc_recipe.report import maps


def _error(name, table):
    """The error with weight sigma^4, from the row of that name."""
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return float(row.split("|")[-2])


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_fit_reproduces_the_papers_map(level):
    # 5e-3 in sup norm: the paper fits random samples, and rounds coefficients to three digits.
    sigma = torch.linspace(0, 1.1, 4001, dtype=torch.float64)
    published = evaluate(COEFFICIENTS[level], sigma)
    fitted = maps.fit(maps.CUTOFFS[level], level)
    assert (evaluate(fitted, sigma) - published).abs().max() < 5e-3
    assert sum(fitted) == pytest.approx(1.0, abs=1e-12)
    # control: another exponent of the weight gives a different map
    other = evaluate(maps.fit(maps.CUTOFFS[level], level, alpha=0.0), sigma)
    assert (other - published).abs().max() > 5e-3


def test_own_fit_beats_the_papers_rounded_map_in_its_own_measure():
    table = maps.table({"own": (maps.fit(0.3, 4), 0.3)})
    papers, ours = _error("level 4", table), _error("own", table)
    assert ours <= papers < 1.1 * ours
    assert _error("own", maps.table({"own": (maps.fit(0.3, 2), 0.3)})) > 1.5 * ours
