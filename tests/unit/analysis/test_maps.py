import math
import tomllib

import pytest

from pc import polynomial
from pc.analysis import maps
from pc.config import PCConfig
from pc.errors import UserError


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_quality_of_the_papers_maps(level):
    quality = maps.quality(polynomial.resolve(level), polynomial.CUTOFFS[level])
    assert quality.at_one == pytest.approx(1.0, abs=1e-9)
    # g(s)/s = p(s^2) is largest at zero, where it is the first coefficient; the grid starts just above
    assert quality.largest_amplification == pytest.approx(polynomial.COEFFICIENTS[level][0], rel=1e-4)
    assert quality.largest_value < 1.03


def test_own_fit_beats_the_papers_rounded_map_in_its_own_measure():
    ours = maps.quality(maps.fit(0.3, 4, 4.0), 0.3)
    papers = maps.quality(polynomial.resolve(4), 0.3)
    assert ours.weighted_error < papers.weighted_error < 1.1 * ours.weighted_error
    lower_degree = maps.quality(maps.fit(0.3, 2, 4.0), 0.3)
    assert lower_degree.weighted_error > 1.5 * ours.weighted_error


def test_the_line_to_paste_trains_with_the_fit():
    fitted = maps.fit(0.5, 3, 4.0)
    level = tomllib.loads(maps.line_to_paste(fitted))["level"]
    assert PCConfig(level=level).level == pytest.approx(
        fitted, abs=4e-6
    )  # three are rounded to six digits, one makes up
    assert sum(level) == pytest.approx(1.0, abs=1e-9)


def test_table_and_bad_wishes():
    text = maps.table({"level 1": (polynomial.resolve(1), 0.8), "flat": (polynomial.POLAR_EXPRESS, 0.01)})
    assert "1.507, -0.507" in text and "8 quintics" in text
    assert "| RMS error, weight sigma^4 |" in text  # also of a fit with another alpha
    with pytest.raises(UserError, match="cutoff"):
        maps.fit(1.5, 4, 4.0)
    with pytest.raises(UserError, match="degree"):
        maps.fit(0.3, 0, 4.0)
    for alpha in (math.nan, math.inf, -math.inf, -400.0):
        with pytest.raises(UserError, match="alpha"):
            maps.fit(0.3, 4, alpha)
