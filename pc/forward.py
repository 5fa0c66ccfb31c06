"""Schedule "forward": PC(W) in every forward pass.

Its `u` and `v` may move only when the weights do: once per optimizer step (paper, algorithm 3). PC layers see to that
themselves (`PCLinear.after_step`), in any training loop that steps an optimizer of torch, under torch.compile too.
"""

from torch import nn

from pc.linear import named_pc_linears


def refresh(model: nn.Module) -> None:
    """Move `u` and `v` of every PC layer on by `power_iterations` steps.

    Called for you after optimizer steps and after loading plain weights; call it yourself after changing weights in
    another way, and once the weights of a model that was on the meta device exist.
    """
    for _, layer in named_pc_linears(model):
        layer.refresh()
