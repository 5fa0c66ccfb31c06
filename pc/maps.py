"""The maps by name: levels, their coefficients, and the check of a user's own map. Needs no torch.

A map is odd: `g(sigma) = sigma * p(sigma^2)`. It is stored as the coefficients of `p` from degree 0 up, so
`(1.5, -0.5)` means `1.5 sigma - 0.5 sigma^3`. A composite of several maps is a tuple of such tuples, in order of
application.
"""

import math
from collections.abc import Sequence
from functools import cache
from numbers import Real
from typing import Any, NamedTuple

from pc.errors import UserError

Coefficients = tuple[float, ...]
Map = Coefficients | tuple[Coefficients, ...]

# Paper, section 3.2: the fitted maps, by level. Each sums to 1, so that g(1) = 1.
COEFFICIENTS: dict[int, Coefficients] = {
    1: (1.507, -0.507),
    2: (2.083, -1.643, 0.560),
    3: (2.909, -4.649, 4.023, -1.283),
    4: (3.625, -9.261, 14.097, -10.351, 2.890),
}

# Paper, appendix "Overly Aggressive Spectrum Flattening": eight quintics whose composite maps nearly
# every singular value in (0, 1] to 1 (Amsel et al., 2025). It is here to show that flattening too much hurts.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (7.2086, -15.5131, 9.0178),
    (3.9623, -2.5813, 0.4542),
    (3.9466, -2.5765, 0.4544),
    (3.8991, -2.5671, 0.4566),
    (3.7186, -2.5308, 0.4653),
    (3.1390, -2.3073, 0.4733),
    (2.1715, -1.5246, 0.3885),
    (1.8648, -1.2224, 0.3577),
)

LEVELS: dict[int | str, Map] = {**dict(sorted(COEFFICIENTS.items())), "polar_express": POLAR_EXPRESS}
LEVEL_NAMES = ", ".join(map(str, LEVELS))

# If the estimate s is too low, W / s has a singular value above 1. COEFFICIENTS may be evaluated up to REACH, where a test
# holds them below 1.26. Polar Express is bounded on [0, OTHER_REACH], where a user's own maps are checked.
REACH, OTHER_REACH = 1.2, 1.1
# Own coefficients: the values that g may take on [0, OTHER_REACH], and how far g(1) may be from 1 without a warning.
OWN_MAP_RANGE = (-0.05, 1.1)
TOLERANCE_AT_ONE = 0.02
# The largest sum of own coefficients' absolute values: at 2,000, PC(W) has an error of some 1 % in tf32.
LARGEST_COEFFICIENTS = 2_000


class Level(NamedTuple):
    """A level that exists, with its map g."""

    name: int | str | Coefficients
    """Its key in `LEVELS`, also if it was given by coefficients; of any other coefficients, these."""
    map: Map

    @property
    def reach(self) -> float:
        """The largest value at which the map may be evaluated."""
        return REACH if self.name in COEFFICIENTS else OTHER_REACH


def resolve(level: int | str | Sequence[float]) -> Level:
    """A level by its key in `LEVELS`, or by the user's own coefficients.

    Raises:
        UserError: no such level, or coefficients that are not usable.
    """
    if isinstance(level, Sequence) and not isinstance(level, str):
        if len(level) < 2 or not all(map(_is_number, level)):
            raise UserError(
                f"pc.level: coefficients {list(level)} must be two or more numbers: those of p from degree 0 up"
            )
        own = tuple(float(number) for number in level)  # type: ignore[arg-type]
        _require_usable(own)
        return Level(next((name for name, published in LEVELS.items() if published == own), own), own)
    if isinstance(level, str) and level in map(str, COEFFICIENTS):
        raise UserError(f"pc.level: PC level {level!r} is text; write {level}, without quotes")
    if not (isinstance(level, str) or _is_number(level)) or level not in LEVELS:
        raise UserError(f"pc.level: PC level {level!r} does not exist; use {LEVEL_NAMES} or a list of coefficients")
    return next(Level(name, map) for name, map in LEVELS.items() if name == level)  # 4 for 4.0


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@cache
def _require_usable(coefficients: Coefficients) -> None:
    """Check a user's own map on [0, OTHER_REACH], the range of singular values after division by the estimated norm.

    The published maps stay within [0, 1.021] there, with absolute coefficients that sum to about 40 at most. Values far
    outside [0, 1] would flip singular vectors or let the norm grow. Large coefficients cancel and leave rounding errors.
    """
    if (size := sum(map(abs, coefficients))) > LARGEST_COEFFICIENTS:
        raise UserError(
            f"pc.level: coefficients {list(coefficients)}: their absolute values sum to {size:.3g}, so in tf32 rounding "
            f"errors dominate PC(W); at most {LARGEST_COEFFICIENTS:,} is usable: take a lower degree or a larger cutoff"
        )
    lowest, highest = OWN_MAP_RANGE
    values = ((x, evaluate(coefficients, x)) for x in (OTHER_REACH * i / 10_000 for i in range(10_001)))
    outside, sigma, value = max((max(y - highest, lowest - y), x, y) for x, y in values)
    if outside > 0:
        raise UserError(
            f"pc.level: coefficients {list(coefficients)}: g({sigma:.4g}) = {value:.4g}, but on [0, {OTHER_REACH}] a map "
            f"must stay within [{lowest}, {highest}]"
        )


def evaluate(map: Map, sigma):
    """`g(sigma)` of a number or, elementwise, of a tensor, by Horner's rule."""
    for coefficients in stages(map):
        squared, value = sigma * sigma, coefficients[-1]
        for a in reversed(coefficients[:-1]):
            value = value * squared + a
        sigma = sigma * value
    return sigma


def stages(map: Map) -> tuple[Coefficients, ...]:
    """The map as a tuple of stages: one stage for plain coefficients."""
    return map if isinstance(map[0], Sequence) else (map,)


class Square(NamedTuple):
    """A polynomial as `factor * root(x)^2 + linear * x + constant`."""

    factor: float
    root: Coefficients
    linear: float
    constant: float


@cache
def complete_square(coefficients: Coefficients) -> Square | None:
    """Write a polynomial of degree 4 as a `Square`; None for other degrees.

    None also if the leading coefficient is small: then the terms of the square are much larger than the polynomial, and
    cancel.
    """
    if len(coefficients) != 5 or not coefficients[4]:
        return None
    a, b, c, d, e = coefficients
    half = d / (2 * e)
    last = (c / e - half * half) / 2
    square = Square(e, (last, half, 1.0), b - 2 * e * half * last, a - e * last * last)
    size = abs(e) * sum(map(abs, square.root)) ** 2 + abs(square.linear) + abs(square.constant)
    return square if size <= 2 * sum(map(abs, coefficients)) else None


@cache
def growth(coefficients: Coefficients) -> float:
    """How large what `polynomial.vjp` stores may become: entries are at most this times the Frobenius norm of the gradient H,
    where singular values of N are at most `REACH`. By the norms of products: |H N^T| is at most |H| times `REACH`. Later
    stages of `polar_express`, which needs float32, meet singular values of up to 2."""
    return 2 * REACH * max(1.0, *_growths(coefficients))  # of D + D^T, and of what is made of it


def _growths(coefficients: Coefficients) -> list[float]:
    """The largest norms that `polynomial._gradient` and the calls within make of S of norm 1; the last is that of the gradient."""
    largest = REACH**2  # eigenvalue of G

    def bound(inner: Coefficients) -> float:  # of |p| up to there; g(sigma) / sigma = p(sigma^2)
        return max(abs(inner[0]), *(abs(evaluate(inner, x) / x) for x in (REACH * i / 100 for i in range(1, 101))))

    _, linear, *higher = coefficients
    if not higher:
        return [abs(linear)]
    if len(higher) == 1:
        return [abs(linear) + 2 * largest * abs(higher[0])]
    if square := complete_square(coefficients):
        of_root = 2 * abs(square.factor) * bound(square.root)
        within = [of_root * one for one in _growths(square.root)]
        return [of_root, *within, within[-1] + abs(square.linear)]
    within = [largest * one for one in _growths(coefficients[1:])]
    return [largest, *within, within[-1] + bound(coefficients[1:])]
