"""Mode "forward": PC(W) is computed in every forward pass, inside the autograd graph (`pc.PCLinear`).

The readable reference. Gradients are those of W and gamma already, the weights always hold W, and `u` and `v` change
only when the weights do, once per optimizer step (paper, algorithm 3).
"""

from pc.preconditioner import Preconditioner
from pc.weight import Weight


class PerForward(Preconditioner):
    """`write_pc` updates `u` and `v`; the layers do the rest."""

    def _add_tensors(self, weight: Weight) -> None:
        layer = weight.module
        layer.start_pc()
        weight.raw, weight.u, weight.v = layer.weight, layer.u, layer.v

    def write_pc(self, share: bool = False) -> None:
        if self.holds_pc:
            return
        for weight in self.weights.values():
            weight.module.refresh()
            weight.u, weight.v = weight.module.u, weight.module.v
        self._set_holds_pc(True)

    def pull_back(self) -> None:
        """Nothing."""

    def restore_raw(self) -> None:
        self.write_raw()

    def write_raw(self) -> None:
        self._set_holds_pc(False)

    def require_unchanged(self, alone: bool = False) -> None:
        """Nothing: a change of W is one that training may make."""

    def _use_loaded(self) -> None:
        self._set_holds_pc(True)
