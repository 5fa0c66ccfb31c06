"""Schedule "forward": compute PC(W) in every forward pass.

`u` and `v` must change only when the weights do: once per optimizer step (paper, algorithm 3). PC layers do this
themselves (`PCLinear.after_step`) in any training loop that steps a torch optimizer, also under torch.compile.
"""

from torch import nn

from pc.linear import named_pc_linears


def refresh(model: nn.Module) -> None:
    """Update `u` and `v` of every PC layer by `power_iterations` power iterations.

    This happens automatically after optimizer steps and after loading plain weights. Call it yourself after changing
    weights in another way, and after materialising a model that was on the meta device.
    """
    for _, layer in named_pc_linears(model):
        layer.refresh()
