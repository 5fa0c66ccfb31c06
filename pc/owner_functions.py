"""What the owner of a stored weight computes, once per optimizer step: it applies `pc.methods` to each matrix.

`pc.owner` calls these with a batch of B weights that are split alike, and with their tensors:

    raw W [B, ...], gammas [B, ...] (absent where they are not learnable), u and v of all matrices (`pc.splits`)
"""

from collections.abc import Sequence

from torch import Tensor

from pc.splits import WeightSplit

Kept = Sequence[Sequence[Tensor]]
"""Of each part: what its method's `write` leaves for `pull_back`."""


def write(
    split: WeightSplit, raw: Tensor, *gamma_u_v: Tensor, advance_first: bool = True
) -> tuple[Tensor, Tensor, Tensor, Kept]:
    """PC(W) as stored, the u and v that it was computed with, and what `pull_back` can use again."""
    results = [
        part.method.write(matrix, gamma, u, v, advance_first)
        for part, matrix, gamma, u, v in zip(
            split.chosen, split.split_weight(raw), *_per_part(split, gamma_u_v), strict=True
        )
    ]
    weights, u, v = zip(*(of_part[:3] for of_part in results), strict=True)
    kept = [of_part[3:] for of_part in results]
    return split.join_weight(weights, base=raw), split.join(u), split.join_v(v), kept


def pull_back(
    split: WeightSplit, raw: Tensor, gradient: Tensor, *gamma_u_v: Tensor, kept: Kept = ()
) -> tuple[Tensor, ...]:
    """The gradients with respect to W, as stored, and to the gammas if there are any, from that with respect to PC(W).

    Rows that are not preconditioned keep their gradient.
    """
    matrices, gradients = split.split_weight(raw), split.split_weight(gradient)
    results = [
        part.method.pull_back(matrix, of_matrix, gamma, u, v, *of_part)
        for part, matrix, of_matrix, gamma, u, v, of_part in zip(
            split.chosen, matrices, gradients, *_per_part(split, gamma_u_v), kept or [()] * len(matrices), strict=True
        )
    ]
    weights, *gammas = zip(*results, strict=True)
    return split.join_weight(weights, base=gradient), *(split.join(gamma) for gamma in gammas)


def invert(split: WeightSplit, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W as stored, u and v, so that PC(W) is the given weight."""
    matrices = zip(split.chosen, split.split_weight(weight), strict=True)
    raw, u, v = zip(*(part.method.invert(matrix) for part, matrix in matrices), strict=True)
    return split.join_weight(raw, base=weight), split.join(u), split.join_v(v)


def _per_part(split: WeightSplit, gamma_u_v: tuple[Tensor, ...]) -> tuple[list, list[Tensor], list[Tensor]]:
    """Gamma (or None), u and v of each part."""
    *gamma, u, v = gamma_u_v
    gammas = split.split_gamma(gamma[0]) if gamma else [None] * len(split.chosen)
    return gammas, split.split_u(u), split.split_v(v)
