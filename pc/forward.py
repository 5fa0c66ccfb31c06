"""Schedule "forward": keep the singular-vector estimates in step with the optimizer.

PC(W) is evaluated in every forward pass, but its `u` and `v` may move only when the weights do: once per
optimizer step (paper, algorithm 3). Torch calls a global hook after every step of every optimizer, so this
works in any training loop, under torch.compile too, without a line of the user's.
"""

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from pc.linear import PCLinear, named_pc_linears
from pc.spectral import power_iteration

_followed: "weakref.WeakKeyDictionary[PCLinear, int]" = weakref.WeakKeyDictionary()
_hook_registered = False


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Move `u` and `v` of every PC layer on by `power_iterations` steps.

    Called for you after optimizer steps; call it yourself after changing weights in another way, after
    loading them for example.
    """
    for _, layer in named_pc_linears(model):
        _refresh_layer(layer)


def follow_optimizers(model: nn.Module) -> None:
    """From now on refresh each PC layer after any optimizer step that changed its weight."""
    global _hook_registered
    for _, layer in named_pc_linears(model):
        if layer.weight.device.type != "meta":
            _refresh_layer(layer)
        _followed[layer] = layer.weight._version
    if not _hook_registered:
        register_optimizer_step_post_hook(_after_any_step)
        _hook_registered = True


def _after_any_step(optimizer, args, kwargs) -> None:
    for layer, version in list(_followed.items()):
        if layer.weight._version != version:
            _refresh_layer(layer)
            _followed[layer] = layer.weight._version


@torch.no_grad()
def _refresh_layer(layer: PCLinear) -> None:
    weight = layer.weight
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()  # on every rank: this schedule is the readable reference, not the fast one
    u, v = power_iteration(weight.to(layer.u.dtype), layer.u, layer.v, layer.pc_config.power_iterations)
    layer.u.copy_(u)
    layer.v.copy_(v)
