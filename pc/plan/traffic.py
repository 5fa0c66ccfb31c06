"""Counts the kernels that a function would launch on a GPU: FLOPs, bytes and precision of each, on the meta device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pc.config import PCConfig
from pc.owner import run_on_owners
from pc.passes import materialise, pull_back


@dataclass(frozen=True)
class Kernel:
    flops: int
    """of a matmul; 0 for all other kernels"""
    bytes: int
    """of inputs and outputs"""
    precision: str
    """"float32", "tf32" or "bfloat16": that of a matmul's inputs"""


class Traffic(TorchDispatchMode):
    """Collects the kernels that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        writes_or_makes = function._schema.is_mutable or not any(r.alias_info for r in function._schema.returns)
        if writes_or_makes and not str(function).startswith(("aten.detach", "aten.empty", "aten._unsafe_view")):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            count = flop_registry.get(function._overloadpacket)
            flops = count(*args, **{**kwargs, "out_val": result}) if count else 0
            self.kernels.append(Kernel(flops, sum(x.nbytes for x in tensors), _precision(tensors)))
        return result


def _precision(tensors: Sequence[Tensor]) -> str:
    if tensors and tensors[0].dtype == torch.bfloat16:
        return "bfloat16"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"


def of_passes(
    matrices: Sequence[tuple[int, int, PCConfig]],
    functions: tuple[Callable, Callable] = (materialise, pull_back),
    **options,
) -> dict[str, Traffic]:
    """Kernels of both passes over matrices of shapes [n, m] on one owner, batched as on a GPU.

    Args:
        matrices: (n, m, config) of each, with one level.
        functions: replacements for `passes.materialise` and `passes.pull_back`.
        options: of `run_on_owners`.
    """
    keys = [config for *_, config in matrices]
    with torch.device("meta"):
        items = [tuple(torch.empty(shape) for shape in ((n, m), (1,), (n,), (m,))) for n, m, _ in matrices]
        pulled = [(weight, torch.empty_like(weight), *rest) for weight, *rest in items]
    with Traffic() as forward:
        run_on_owners(functions[0], items, [(weight, u, v) for weight, _, u, v in items], keys, **options)
    with Traffic() as backward:
        run_on_owners(functions[1], pulled, [(gradient, gamma) for _, gradient, gamma, *_ in pulled], keys, **options)
    return {"materialise": forward, "pull back": backward}
