"""JSON lines and text files give the same shards as the same texts in parquet."""

import gzip
import json
import subprocess

import numpy as np
import pyarrow as pa
import pytest

from pc.data import text_files
from pc.data.sources import find_files, plan_units, read_footers, read_rows
from pc.data.tokenizing import tokenize
from pc.data.train_tokenizer import train_tokenizer
from pc.errors import UserError


def lines(texts, column="text") -> bytes:
    return b"".join(json.dumps({"id": i, column: text}).encode() + b"\n" for i, text in enumerate(texts))


def compressed(content: bytes, suffix: str) -> bytes:
    """As tools write it: two members or frames, one after another."""
    half = len(content) // 2
    if suffix == ".gz":
        return gzip.compress(content[:half]) + gzip.compress(content[half:])
    if suffix == ".zst":
        return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (content[:half], content[half:]))
    return content


def tokens_of(manifest):
    return np.concatenate([np.load(manifest.folder / shard.tokens_file) for shard in manifest.shards["train"]])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_give_the_tokens_that_parquet_gives(suffix, tmp_path, make_texts, write_parquet, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", 500)  # many groups in a small file
    texts = [*make_texts(40, seed=1), None, "", "two\nlines", "x" * 2000, *make_texts(10, seed=2)]
    write_parquet(tmp_path / "p" / "a.parquet", texts)
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / f"a.jsonl{suffix}").write_bytes(compressed(b"\n" + lines(texts) + b"\n", suffix))
    expected = tokenize(str(tmp_path / "p"), tmp_path / "from-parquet", validation_fraction=0.0)
    found = tokenize(str(tmp_path / "j"), tmp_path / "from-lines", validation_fraction=0.0)
    np.testing.assert_array_equal(tokens_of(found), tokens_of(expected))
    assert found.documents("train") == len(texts)
    # however the groups are split, each line is read once
    (file,) = read_footers(find_files(str(tmp_path / "j")), "text")
    assert len(file.row_groups) > 10 and file.rows == len(texts)
    units = plan_units([file], 1500)
    assert len(units) > 3
    assert [text for unit in units for rows in read_rows(unit, "text") for text in rows] == [
        (text or "").encode() for text in texts
    ]


def test_a_text_file_is_a_document_and_many_make_a_unit(tmp_path, make_texts):
    texts = make_texts(25, seed=3)
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02d}.txt").write_text(text)
    units = plan_units(read_footers(find_files(str(tmp_path)), "text"), 600)
    assert 1 < len(units) < len(texts)
    assert [text.decode() for unit in units for rows in read_rows(unit, "text") for text in rows] == texts
    manifest = tokenize(str(tmp_path), tmp_path / "shards", validation_fraction=0.0)
    assert manifest.documents("train") == len(texts) and len(manifest.shards["train"]) == 1
    again = tokenize(str(tmp_path), tmp_path / "shards", validation_fraction=0.0)  # the plan is read back
    assert again.configuration_sha256 == manifest.configuration_sha256
    assert train_tokenizer(str(tmp_path / "0*.txt"), tmp_path / "tokenizer", 300, 1) <= 300


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "a.jsonl, line at byte 14: not JSON"),
        ("a.jsonl", b'{"content": "x"}\n', "no 'text'; it has content (--text-column)"),
        ("a.jsonl", b"[1]\n", "no 'text'; it is a list"),
        ("a.jsonl", b'{"text": 7}\n', "'text' is a int, not text"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read"),
        (
            "a.jsonl.zst",
            pa.compress(b'{"text": "x"}\n' * 99, codec="zstd", asbytes=True)[:-9],
            "a.jsonl.zst cannot be read",
        ),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-20], "a.jsonl.gz cannot be read"),
        ("a.csv", b"text\nx\n", "the name should end in .parquet, .jsonl or .txt"),
    ],
)
def test_mistakes_in_a_line(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        tokenize(str(tmp_path / name), tmp_path / "shards")
    assert said in str(raised.value)


def test_a_folder_of_several_kinds_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]))
    (tmp_path / "README.txt").write_text("not a document")
    with pytest.raises(UserError, match=r"several kinds \(1 of text, 1 of JSON lines\); choose one with a pattern"):
        find_files(str(tmp_path))
    assert find_files(str(tmp_path / "*.jsonl")) == [str(tmp_path / "a.jsonl")]


def test_the_command_of_another_tool(tmp_path):
    """Files of the `gzip` command are read."""
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]))
    subprocess.run(["gzip", tmp_path / "a.jsonl"], check=True)
    (file,) = read_footers(find_files(str(tmp_path)), "text")
    assert file.rows == 2
