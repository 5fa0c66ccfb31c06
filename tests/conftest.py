import pytest
from tiny import make_shards, write_config


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the long tests, and only them")


def pytest_collection_modifyitems(config, items):
    soak = config.getoption("--soak")
    chosen = [item for item in items if ("soak" in item.keywords) == soak]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory):
    """Token shards for the tiny model."""
    return make_shards(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_config(tiny_shards, tmp_path):
    """(config file, run folder) of the tiny model."""
    return write_config(tmp_path / "tiny.toml", tiny_shards, tmp_path / "run"), tmp_path / "run"
