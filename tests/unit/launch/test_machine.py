"""What a run needs of the machine is said before its processes start."""

import shutil
from types import SimpleNamespace

import pytest

from pc.errors import UserError
from pc.launch import machine
from pc.settings import Config


@pytest.fixture
def config():
    config = Config()
    config.compile.enable = True
    config.training.local_batch_size, config.training.seq_len = 16, 2048
    config.training.dataloader.num_workers, config.training.dataloader.prefetch_factor = 2, 4
    return config


def test_compilation_needs_a_compiler_and_headers(config, monkeypatch, tmp_path):
    machine.require(config, 1)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CXX", raising=False)
        with pytest.raises(UserError, match=r"compile.enable = true needs g\+\+ on the PATH; install it"):
            machine.require(config, 1)
        patch.setattr(machine.torch.cuda, "is_available", lambda: True)
        with pytest.raises(UserError, match="needs gcc or clang on the PATH"):  # Triton asks for a C compiler
            machine.require(config, 1)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=r"needs .*/Python.h; install it \(Debian: apt-get install python3"):
        machine.require(config, 1)
    config.compile.enable = False
    machine.require(config, 1)


def test_the_shared_memory_of_a_container(config, monkeypatch):
    """Docker gives 64 MiB, and the workers of eight processes hold 8 x 2 x 4 batches of 0.5 MiB: 32 MiB, and NCCL 1 GiB."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * machine.MIB))
    machine.require(config, 8)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    machine.require(config, 1)
    with pytest.raises(UserError, match="64 MiB free, and .* 8 processes need 1056 MiB; .*--shm-size=16g"):
        machine.require(config, 8)
    config.training.local_batch_size = 600
    with pytest.raises(UserError, match="1 processes need 150 MiB"):
        machine.require(config, 1)
