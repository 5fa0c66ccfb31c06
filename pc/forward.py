"""Schedule "forward": PC(W) is computed in every forward pass (`pc.PCLinear`).

`u` and `v` must change only when the weights do: once per optimizer step (paper, algorithm 3).
"""

from torch import nn

from pc.linear import PCLinear
from pc.schedules import PC, Schedule, State, require_real
from pc.weights import Weight, named_weights


class ForwardSchedule(Schedule):
    """Updates `u` and `v` of every `PCLinear` after each optimizer step; gradients are those of W and gamma already."""

    saved = ("gamma", "u", "v")

    def state_of(self, mark: Weight) -> State:
        require_real(mark)
        layer = mark.module
        if not layer.pc_is_initialised:  # it was on the meta device
            layer.reset_pc()
        return State(mark, layer.weight, layer.gamma, layer.weight, layer.u, layer.v)

    def materialise(self) -> None:
        for state in self.weights.values():
            layer = state.mark.module
            layer.refresh()
            state.u, state.v = layer.u, layer.v
        self._set_phase(PC)

    def _use_loaded(self) -> None:
        self._set_phase(PC)  # u and v are those that PC(W) was computed with


def refresh(model: nn.Module) -> None:
    """Update `u` and `v` of every PC layer of schedule "forward" by `power_iterations` power iterations.

    The schedule does this after every optimizer step, and a layer when plain weights are loaded into it. Call it after
    changing weights in another way, or to evaluate a model without a schedule.
    """
    for _, weight in named_weights(model):
        if isinstance(weight.module, PCLinear):
            weight.module.refresh()
            weight.require("")
