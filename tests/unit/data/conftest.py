"""Small parquet sets and shard folders for the tests of the data path."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizing import tokenize

WORDS = "the of polynomial weight spectrum layer gradient singular value norm is grows 3.14 – naïve 字 \n".split(" ")


def random_texts(count: int, seed: int) -> list[str]:
    choose = random.Random(seed)
    # numbered, so that all differ
    return [f"{seed}.{i} " + " ".join(choose.choices(WORDS, k=choose.randint(1, 60))) for i in range(count)]


@pytest.fixture(scope="session")
def make_texts():
    return random_texts


@pytest.fixture(scope="session")
def write_parquet():
    """write_parquet(path, texts, column="text", row_group_size=…): texts may be str, bytes or None."""

    def write(path: Path, texts: list, column: str = "text", **kwargs) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(isinstance(text, bytes) for text in texts):
            # invalid UTF-8 in a string column, as from broken writers
            binary = pa.array([t.encode() if isinstance(t, str) else t for t in texts], pa.binary())
            texts = pa.Array.from_buffers(pa.string(), len(binary), binary.buffers())
        pq.write_table(
            pa.table({"id": pa.array(range(len(texts))), column: pa.array(texts, pa.string())}),
            path,
            **kwargs,
        )
        return path

    return write


@pytest.fixture(scope="session")
def parquet_folder(tmp_path_factory, write_parquet) -> Path:
    """Five files of 80 documents."""
    folder = tmp_path_factory.mktemp("parquet")
    for number in range(5):
        write_parquet(folder / f"part-{number}.parquet", random_texts(80, seed=number), row_group_size=30)
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory, parquet_folder) -> Manifest:
    """The five files as shards, 5 for training and about 20 % of the documents for validation. Read only."""
    return tokenize(str(parquet_folder), tmp_path_factory.mktemp("shards"), validation_fraction=0.2)
