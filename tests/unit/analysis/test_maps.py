import tomllib

import pytest
import torch

from pc import polynomial
from pc.analysis import maps
from pc.config import PCConfig
from pc.errors import UserError


def _numbers(map, cutoff):
    """g(1), largest amplification, largest value, largest error, weighted error."""
    line = maps.table({"one": (map, cutoff)}).splitlines()[2]
    return [float(cell) for cell in line.split("|")[3:8]]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_fit_reproduces_the_papers_map(level):
    # 5e-3 in sup norm: the paper sampled at random, and rounds its coefficients to three digits.
    sigma = torch.linspace(0, 1.1, 4001, dtype=torch.float64)
    published = polynomial.evaluate(polynomial.COEFFICIENTS[level], sigma)
    fitted = maps.fit(maps.CUTOFFS[level], level)
    assert (polynomial.evaluate(fitted, sigma) - published).abs().max() < 5e-3
    assert sum(fitted) == pytest.approx(1.0, abs=1e-12)
    # control: another exponent of the weight is a different map
    other = polynomial.evaluate(maps.fit(maps.CUTOFFS[level], level, alpha=0.0), sigma)
    assert (other - published).abs().max() > 5e-3


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_the_papers_maps(level):
    at_one, amplification, largest, *_ = _numbers(polynomial.resolve(level), maps.CUTOFFS[level])
    assert at_one == 1.0
    # g(s)/s = p(s^2) is largest at zero, where it is the first coefficient; the grid starts just above
    assert amplification == pytest.approx(polynomial.COEFFICIENTS[level][0], abs=6e-4)
    assert largest < 1.03


def test_own_fit_beats_the_papers_rounded_map_in_its_own_measure():
    ours, papers = (_numbers(map, 0.3)[-1] for map in (maps.fit(0.3, 4, 4.0), polynomial.resolve(4)))
    assert ours <= papers < 1.1 * ours
    assert _numbers(maps.fit(0.3, 2, 4.0), 0.3)[-1] > 1.5 * ours


def test_the_line_to_paste_trains_with_the_fit():
    fitted = maps.fit(0.5, 3, 4.0)
    level = tomllib.loads(maps.line_to_paste(fitted))["level"]
    # three are rounded to six digits, one makes up
    assert PCConfig(level=level).level == pytest.approx(fitted, abs=4e-6)
    assert sum(level) == pytest.approx(1.0, abs=1e-9)


def test_a_cutoff_outside_its_range():
    with pytest.raises(UserError, match="cutoff"):
        maps.fit(1.5, 4, 4.0)
