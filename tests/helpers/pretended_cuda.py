"""A fake CUDA device that computes nothing: shapes and devices of a GPU's work, on a machine without one.

    with pretended_cuda() as strict:
        tensor = torch.empty(3, 4, device="cuda")       # no memory, no numbers
        with strict:                                    # here CPU tensors and waits for the device are errors
            ...

In a CPU build torch's FakeTensorMode has no CUDA device, because no device guard is registered. A guard that does
nothing is two lines of C++ with torch's headers.
"""

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pc import assignment

COMPILER = shutil.which("g++")
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.masked_select")
COPIES = ("aten.copy_.default", "aten._to_copy.default")


def waits(function: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether the host waits for the device. Copies between them wait too, unless they are non-blocking."""
    name, device = str(function), args[0].device if args and isinstance(args[0], Tensor) else None
    if name not in COPIES:
        return name.startswith(WAITS) and device is not None and device.type != "cpu"
    other = args[1].device if name == COPIES[0] else kwargs.get("device", device)
    return torch.device(other).type != device.type and not (kwargs.get("non_blocking") or args[2:3] == (True,))


class Strict(TorchDispatchMode):
    """Refuses operations that use a CPU tensor or make the host wait for the device. A scalar that was copied to the host
    without waiting may be read there: it is 0."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = str(function), kwargs or {}
        if waits(function, args, kwargs):
            raise AssertionError(f"{name} waits for the device")
        if name == "aten._local_scalar_dense.default":
            return 0.0
        result = function(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.device.type != "cuda" and tensor.ndim:
                raise AssertionError(f"{name} has a tensor {tuple(tensor.shape)} on {tensor.device}")
        return result


class Counted(TorchDispatchMode):
    """Counts, while `on`, the operations on the device (but views, which do nothing there), the exchanges, and the waits of
    the host. Every number that the host reads is 1, or 0 if it is an integer."""

    on = True

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.exchanges, self.waits = Counter[str](), Counter[str](), Counter[str]()
        self.counters = {"operations": self.operations, "exchanges": self.exchanges, "waits": self.waits}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operations on shards come here in their turn
        name, kwargs = str(function), kwargs or {}
        self.waits[name] += self.on and waits(function, args, kwargs)
        if name == "aten._local_scalar_dense.default" and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0
        result = function(*args, **kwargs)
        if function.namespace in ("c10d", "_c10d_functional"):
            self.exchanges[name] += self.on and "wait_tensor" not in name
        elif (
            function.namespace == "aten"
            and not (function.is_view or "empty" in name)
            and any(t.is_cuda for t in tree_leaves((args, result)) if isinstance(t, Tensor))
        ):
            self.operations[name] += self.on
        return result

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Stop counting inside this context."""
        self.on, before = False, self.on
        yield
        self.on = before


@contextlib.contextmanager
def pretended_cuda() -> Iterator[Strict]:
    """Call this before the process's first backward pass, because autograd counts devices once."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        root = Path(torch.__file__).parent
        command = [COMPILER, "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", str(source), "-o", str(library)]
        subprocess.run([*command, f"-L{root / 'lib'}", "-lc10"], check=True)
        ctypes.CDLL(str(library))
    # with a mock, an event has happened as soon as it is recorded: the device computes nothing
    with FakeTensorMode(), mock.patch("torch.Event"), mock.patch.object(assignment, "_group_on", _group_on):
        yield Strict()


def _group_on(*of, group_on=assignment._group_on):
    """Read the mesh's ranks outside the fake mode: they are in a real tensor."""
    with _disable_current_modes():
        return group_on(*of)
