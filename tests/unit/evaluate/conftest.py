"""Fixtures for the tests of scoring and export; tests must not change them."""

from pathlib import Path

import pytest

from helpers.made_runs import MadeRun, make_evaluation_data, make_run
from helpers.tiny import make_shards
from pc import PCConfig
from pc_recipe.evaluate.hugging_face import export


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("data"), "mistral-common")


@pytest.fixture(scope="session")
def pc_run(tmp_path_factory, data_folder) -> MadeRun:
    """With PC, level 4."""
    return make_run(tmp_path_factory.mktemp("runs") / "pc", data_folder, PCConfig(level=4))


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory, data_folder) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("runs") / "plain", data_folder, None, seed=1)


@pytest.fixture(scope="session")
def pc_export(tmp_path_factory, pc_run) -> Path:
    """Hugging Face folder made from `pc_run`."""
    return export(pc_run.checkpoint, tmp_path_factory.mktemp("exports") / "pc")


@pytest.fixture(scope="session")
def evaluation_data(tmp_path_factory) -> Path:
    """Three synthetic items per task."""
    return make_evaluation_data(tmp_path_factory.mktemp("evaluation") / "sets")
