"""How large effective weights are, and how far one update moves them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pc.blocks import block_of, names_layer
from pc.shards import local
from pc.targets import clean_name
from pc_recipe.train.rank_sums import share_of

NORM, CHANGE = "norm/effective", "change"


class UpdateSizes:
    """Norms and changes of the matrices that `entries` of `pc.blocks` match, also without PC.

    Create it while FSDP has the parameters sharded.

    Args:
        model_parts: this rank's.
        ranks: those of one pipeline stage.
    """

    def __init__(self, model_parts: Sequence[nn.Module], entries: Sequence[str], ranks: int) -> None:
        self._weights = [
            linear.weight
            for part in model_parts
            for name, linear in part.named_modules()
            if isinstance(linear, nn.Linear) and block_of(clean_name(name))
            if names_layer(entries, clean_name(name))
        ]
        self._before: list[Tensor] = []
        self.factors = [(kind, share_of(weight, ranks)) for kind in (NORM, CHANGE) for weight in self._weights]
        """(name, factor) of each number that `stop` returns, for `RankNumbers`"""

    def start(self) -> None:
        """Copy the weights: before the update, when activations are gone."""
        self._before = [local(weight).clone() for weight in self._weights]

    def stop(self) -> list[Tensor]:
        """After the update: this rank's squared norms of the weights before it and of their changes; [] if not started."""
        if not self._before:
            return []
        changes, self._before = self._before, []
        norms = torch._foreach_norm(changes, 2, torch.float64)
        torch._foreach_sub_(changes, [local(weight) for weight in self._weights])
        return [torch.stack([*norms, *torch._foreach_norm(changes, 2, torch.float64)]).square()]
