"""A fake CUDA device that computes nothing: shapes and devices of a GPU's work, on a machine without one.

    with pretended_cuda() as strict:
        tensor = torch.empty(3, 4, device="cuda")       # no memory, no numbers
        with strict:                                    # in here no CPU tensors, and no wait for the device
            ...

In a CPU build torch's FakeTensorMode has no CUDA device, because no device guard is registered. A guard that does
nothing is two lines of C++ with torch's headers.
"""

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPILER = shutil.which("g++")
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.masked_select")


class Strict(TorchDispatchMode):
    """Refuses operations that use a CPU tensor or make the host wait for the device. A number may be sent to the host
    without waiting, and read there: it is 0."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name == "aten._local_scalar_dense.default" and args[0].device.type == "cpu":
            return 0.0
        blocks = name == "aten.copy_.default" and args[0].device.type == "cpu" and args[2:] != (True,)
        if name.startswith(WAITS) or blocks:
            raise AssertionError(f"{name} waits for the device")
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.device.type != "cuda" and tensor.ndim:
                raise AssertionError(f"{name} has a tensor {tuple(tensor.shape)} on {tensor.device}")
        return result


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
    # an event of a device that computes nothing has happened once it is recorded
    with FakeTensorMode(), mock.patch("torch.Event"):
        yield Strict()
