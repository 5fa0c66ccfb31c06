"""How well a model's matrices are conditioned, compared with random matrices of the same shapes, and what PC would change.

Singular values are square roots of the eigenvalues of the smaller Gram matrix in float64. Where squaring could change the
condition number by a relative `GRAM_ERROR` or more, from condition numbers of about 1e3 on, a singular value decomposition
is used instead, which is three times slower.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pc.config import PCConfig
from pc.maps import COEFFICIENTS, evaluate, stages
from pc.matrices import Stored, stored_weights
from pc.spectral import modified_condition_number, singular_values
from pc.targets import clean_name

NUMBERED_LEVELS = tuple(sorted(COEFFICIENTS))
PC_BLOCKS = ("o", "gate", "up", "down")  # those of PCConfig's default
SMALL = 0.01
GRAM_ERROR = 1e-10
_POINTS = 100_000  # at which the Marchenko-Pastur density is summed


@dataclass(frozen=True)
class Figures:
    """Statistics of the singular values of one matrix."""

    largest: float
    condition: float
    """modified condition number: the largest over the mean of the smallest tenth"""
    stable_rank: float
    """sum of squares over the largest square"""
    effective_rank: float
    """exp of the entropy of the singular values over their sum (Roy and Vetterli, 2007)"""
    small: float
    """share below 1 % of the largest"""


def figures(sigma: Tensor) -> Figures:
    """The `Figures` of singular values [k] in any order, not all zero."""
    largest = sigma.max()
    return Figures(
        largest=largest.item(),
        condition=modified_condition_number(sigma).item(),
        stable_rank=(sigma / largest).square().sum().item(),
        effective_rank=torch.special.entr(sigma / sigma.sum()).sum().exp().item(),
        small=(sigma < SMALL * largest).double().mean().item(),
    )


def exact_singular_values(matrix: Tensor) -> tuple[Tensor, str]:
    """Singular values of [n, m], ascending, in float64, and how they were computed: "gram" or "svd"."""
    sigma = singular_values(matrix)
    tenth = sigma[: math.ceil(len(sigma) / 10)]
    # an eigenvalue is off by about epsilon times the largest, s^2, so a singular value t by epsilon s^2 / (2 t)
    error = torch.finfo(sigma.dtype).eps * sigma[-1].square() * tenth.reciprocal().mean() / (2 * tenth.mean())
    if error < GRAM_ERROR:
        return sigma, "gram"
    return torch.linalg.svdvals(matrix.double()).flip(-1), "svd"


@cache
def gaussian_singular_values(rows: int, columns: int) -> Tensor:
    """Expected singular values of a matrix of independent normal entries of variance 1, [min(rows, columns)], ascending.

    These are quantiles, one for each singular value, of the density of Marchenko and Pastur. The largest one is a little below
    the density's edge, as that of a finite matrix is.
    """
    short, long = sorted((rows, columns))
    ratio = math.sqrt(short / long)
    low, high = (1 - ratio) ** 2, (1 + ratio) ** 2
    # integrated over the angle of the semicircle, in which the density has no edge: eigenvalue = centre - radius cos(angle)
    angle = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) * (math.pi / _POINTS)
    eigenvalue = (low + high) / 2 - (high - low) / 2 * angle.cos()
    cumulated = (angle.sin().square() / eigenvalue).cumsum(0)
    wanted = (torch.arange(short, dtype=torch.float64) + 0.5) / short
    index = torch.searchsorted(cumulated / cumulated[-1], wanted).clamp(max=_POINTS - 1)
    return (eigenvalue[index] * long).sqrt()


@cache
def _gaussian_figures(rows: int, columns: int) -> Figures:
    return figures(gaussian_singular_values(rows, columns))


@dataclass(frozen=True)
class Measured:
    """One matrix."""

    name: str
    """its parameter's, with [i] for the i-th of several matrices of a part"""
    layer: str
    block: str
    shape: tuple[int, int]
    sigma: Tensor
    """singular values, ascending, float64"""
    by: str
    """"gram" or "svd" """

    @cached_property
    def figures(self) -> Figures:
        return figures(self.sigma)

    @property
    def random(self) -> Figures:
        """The figures of a Gaussian matrix of this shape, with entries of variance 1."""
        return _gaussian_figures(*self.shape)

    @property
    def ratio(self) -> float:
        """Its condition number over that of a Gaussian matrix of this shape."""
        return self.figures.condition / self.random.condition

    def sigma_at(self, level: int) -> Tensor:
        """Singular values of PC(W), gamma 1, with the exact norm."""
        largest = self.sigma[-1]
        return largest * evaluate(COEFFICIENTS[level], self.sigma / largest)

    @cached_property
    def condition_at(self) -> dict[int, float]:
        """Condition number of PC(W) by level."""
        return {level: modified_condition_number(self.sigma_at(level)).item() for level in NUMBERED_LEVELS}

    def as_dict(self) -> dict:
        """For JSON, which has no infinity: None in its place."""
        values: dict[str, Any] = {
            "name": self.name,
            "layer": self.layer,
            "block": self.block,
            "shape": self.shape,
            "by": self.by,
        }
        values |= asdict(self.figures) | {"ratio": self.ratio}
        values |= {f"condition_at_level_{level}": value for level, value in self.condition_at.items()}
        values |= {f"random_{key}": value for key, value in asdict(self.random).items()}
        return {key: None if value == math.inf else value for key, value in values.items()}


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


@dataclass(frozen=True)
class Conditioning:
    """The matrices of a model, and a line about each tensor that was left out."""

    matrices: list[Measured]
    left_out: list[str]

    @property
    def in_layers(self) -> list[Measured]:
        return [matrix for matrix in self.matrices if matrix.layer]

    @property
    def of_pc(self) -> list[Measured]:
        """Those of the blocks that PC changes by default: o, gate, up, down."""
        return [matrix for matrix in self.in_layers if matrix.block in PC_BLOCKS]

    def by_block(self, of_layers: bool) -> dict[str, list[Measured]]:
        """The matrices of numbered layers, or those outside them (embeddings, heads). q, k, v and `PC_BLOCKS` come first."""
        chosen = [matrix for matrix in self.matrices if bool(matrix.layer) == of_layers]
        blocks = dict.fromkeys(["q", "k", "v", *PC_BLOCKS, *(matrix.block for matrix in chosen)])
        of_block = {block: [matrix for matrix in chosen if matrix.block == block] for block in blocks}
        return {block: matrices for block, matrices in of_block.items() if matrices}

    def cost_bound(self, tokens: int) -> float:
        """The paper's bound on PC's FLOPs at level 4 in a step of so many tokens, relative to those of the layers' matrices."""
        of_all = sum(math.prod(matrix.shape) for matrix in self.in_layers)
        return sum(math.prod(m.shape) * cost_bound(m.shape, tokens, PCConfig()) for m in self.of_pc) / of_all

    def as_dict(self) -> dict:
        return {"matrices": [matrix.as_dict() for matrix in self.matrices], "left_out": self.left_out}


def cost_bound(shape: Sequence[int], tokens: int, config: PCConfig) -> float:
    """The paper's bound ((k + 1) s + 2 q + 1) / B on PC's FLOPs in a step, relative to 6nmB, those of the matrix itself.

    Args:
        shape: n, m, of which s is the smaller.
        tokens: B, of the step.
    """
    terms = sum(map(len, stages(config.only_level.map)))
    return (terms * min(shape) + 2 * config.power_iterations + 1) / tokens


def work(stored: Stored) -> float:
    """Relative time to measure a stored weight: the matmul of each Gram matrix [r, r], and 3 r^3 for its eigenvalues."""
    return sum(count * min(n, m) ** 2 * (2.0 * max(n, m) + 3.0 * min(n, m)) for count, n, m in stored.shapes)


def sample_layers(weights: Sequence[Stored], count: int) -> list[Stored]:
    """The weights of `count` layers, evenly spaced from the first to the last, and all outside of layers."""
    layers = list(dict.fromkeys(stored.layer for stored in weights if stored.layer))
    last, steps = len(layers) - 1, max(count - 1, 1)
    chosen = {"", *(layers[round(i * last / steps)] for i in range(min(count, len(layers))))}
    return [stored for stored in weights if stored.layer in chosen]


def conditioning(
    model: nn.Module,
    load: Callable[[str], Tensor] | None = None,
    layers: int | None = None,
    watch: Callable[[list[Stored]], Iterable[Stored]] = iter,
) -> Conditioning:
    """Measure every matrix of a model, one at a time, on the device of its tensors.

    In a model with PC it measures PC(W). Peak memory is the largest weight in float64, and its Gram matrix.

    Args:
        model: any module; with `load` it may be on the meta device.
        load: gives a parameter by its name; default: the model's own.
        layers: measure this many layers only.
        watch: yields the weights that it is given, and shows progress.

    Raises:
        UserError: a split of a known class does not fit its weight.
    """
    weights, left_out = stored_weights(model)
    load = load or {clean_name(name): weight for name, weight in model.named_parameters()}.__getitem__
    measured = []
    for stored in watch(weights if layers is None else sample_layers(weights, layers)):
        with torch.no_grad():
            for block, matrices in stored.cut(load(stored.name)):
                for index, matrix in enumerate(matrices):
                    name = f"{stored.name}[{index}]" if len(matrices) > 1 else stored.name
                    if not matrix.isfinite().all():
                        left_out.append(f"{name}: has NaN or infinite entries")
                    elif not matrix.any():
                        left_out.append(f"{name}: all zeros")
                    else:
                        sigma, by = exact_singular_values(matrix)
                        shape = (matrix.size(0), matrix.size(1))
                        measured.append(Measured(name, stored.layer, block, shape, sigma.cpu(), by))
    return Conditioning(measured, left_out)
