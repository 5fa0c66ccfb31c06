"""Text files other than parquet: every kind alone and in a mixed folder, odd bytes, mistakes, memory."""

import bz2
import csv
import gzip
import json
import lzma
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_dataset_builder, load_from_disk
from tokenizers import Tokenizer

from helpers.small_tokenizers import make_tokenizer
from pc.errors import UserError
from pc_recipe.data import tokenizing
from pc_recipe.data.inspection import describe, read_documents
from pc_recipe.data.manifest import SPLITS
from pc_recipe.data.sources import divide_into_units, find_files, measure_files, read_texts
from pc_recipe.data.text_files import LONGEST
from pc_recipe.data.tokenizers import load_tokenizer
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.data.tokenizing_job import validation_share


def compressed(content: bytes, kind: str = "zstd") -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def lines(*texts: str | None) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def arrow_stream(**columns: list) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write(table)
    return sink.getvalue().to_pybytes()


# one block, of this line as it is, after a header that asks for 256 MiB; `zstd --long=28` writes such frames
LONG_WINDOW = (
    b"\x28\xb5\x2f\xfd\x00" + bytes([(28 - 10) << 3]) + (len(lines("x")) << 3 | 1).to_bytes(3, "little") + lines("x")
)

KINDS = {
    "a.jsonl": (lines("one", None, "two\r\nlines") + b"\n", ["one", "two\r\nlines"]),
    "b.jsonl.gz": (gzip.compress(lines("three")) + gzip.compress(lines("four")), ["three", "four"]),
    "c.jsonl.zst": (compressed(lines("five", "\ud83d\ude00 \ud800")), ["five", "😀 \ufffd"]),
    "d.csv": (b'\xef\xbb\xbfid,text\r\n1,"a ""b"",\r\nc"\r\n2,plain\r\n', ['a "b",\r\nc', "plain"]),
    "e.csv.gz": (gzip.compress(b"text\nx\n" + b"y" * 200_000), ["x", "y" * 200_000]),
    "f.txt": (b"\xef\xbb\xbfone\r\n\r\ntwo\r\n", ["one\n\ntwo\n"]),
    "g.MD": ("# Tîtle\n\ntext".encode(), ["# Tîtle\n\ntext"]),
    "h.txt.gz": (gzip.compress(b"packed"), ["packed"]),
    "i.txt": ("naïve café".encode("latin-1"), ["na\ufffdve caf\ufffd"]),
    "j.txt": (b"", []),
    "k.jsonl": (b"", []),
    "l.txt": (b"\n \n", []),
    "m.jsonl": (b'{"text": "caf\xe9"}\n', ["caf\ufffd"]),
    "n.txt": ("kept: \ufffd".encode(), ["kept: \ufffd"]),
    "o.json": (lines("six"), ["six"]),
    "p.ndjson.bz2": (bz2.compress(lines("seven")) + bz2.compress(lines("eight")), ["seven", "eight"]),
    "q.json.xz": (lzma.compress(lines("nine")) + lzma.compress(lines("ten")), ["nine", "ten"]),
    "r.json.lz4": (compressed(lines("eleven"), "lz4") + compressed(lines("twelve"), "lz4"), ["eleven", "twelve"]),
}


def texts_of(*sources: Path | str, text_key: str = "text", replaced: Counter | None = None) -> list[str]:
    units = divide_into_units(measure_files(find_files([*map(str, sources)], Counter()), text_key), 10**9)
    return [
        text
        for unit in units
        for text in read_texts(unit, text_key, Counter() if replaced is None else replaced, Counter())
    ]


def test_a_mixed_folder(tmp_path, write_parquet):
    source = tmp_path / "in"
    for name, (content, _) in KINDS.items():
        (source / name[0]).mkdir(parents=True)
        (source / name[0] / name).write_bytes(content)
    write_parquet(source / "z.parquet", ["last", b"\xff"])
    (source / ".hidden.txt").write_text("never")
    (source / "picture.png").write_bytes(b"never")
    manifest = tokenize(str(source), source / "out")  # in the input folder, but not read as input by the repeat
    assert (
        describe(manifest).splitlines()[-2]
        == "left out     1 hidden; 1 of the ending '.png'; 2 empty; 2 documents without text"
    )
    tokenizer = load_tokenizer("mistral-common")
    stored = [tokens.tolist()[1:-1] for split in SPLITS for tokens in read_documents(manifest, split)]
    wanted = [tokenizer.encode(text) for _, texts in KINDS.values() for text in texts]
    wanted += [tokenizer.encode(text) for text in ("last", "\ufffd")]
    assert sorted(stored) == sorted(wanted)
    assert len(manifest.shards["train"]) == 2  # small files share one, a parquet file has its own
    counted = {Path(file).name: number for file, number in manifest.source["replaced"].items()}
    assert counted == {"c.jsonl.zst": 1, "i.txt": 2, "m.jsonl": 1, "z.parquet": 1}
    assert "(6 .txt, 5 .jsonl, 3 .json, 2 .csv, 1 .md, 1 .ndjson, 1 .parquet)" in describe(manifest)
    assert "5 bytes became U+FFFD, in 4 files" in describe(manifest)
    assert tokenize(str(source), source / "out") == manifest


def test_several_inputs_are_read_once_each(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    one, other = tmp_path / "b.txt", tmp_path / "a.txt"
    assert texts_of(one, other, tmp_path) == ["b", "a"]


@pytest.mark.parametrize(
    "between", ["\r\n\r\n", "\n", "\n    ", " ", ""], ids=["blank", "line", "indented", "word", "none"]
)
def test_a_long_text_is_cut_where_it_can_be(between, tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes(between.join(f"é{i:06}é" * 20 for i in range(700)).encode())
    texts = texts_of(file)
    assert "".join(texts) == file.read_text() and len(texts) > 5
    assert not between or all(text.lstrip(" ").startswith("é") for text in texts)
    assert all(LONGEST // 2 <= len(text) <= LONGEST for text in texts[:-1])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl.gz", "a.txt.xz"])
def test_memory_is_bounded_by_a_few_documents(name, tmp_path):
    line = b"no blank line and no end of a line " * 30_000  # 1 MB
    content = lines(*[line.decode()[:3000]] * 4000) if "jsonl" in name else line * 12
    packed = {".gz": lambda: gzip.compress(content, 1), ".xz": lambda: lzma.compress(content, preset=0)}
    (tmp_path / name).write_bytes(packed.get(Path(name).suffix, lambda: content)())
    (unit,) = divide_into_units(measure_files([str(tmp_path / name)], "text"), 10**9)
    tracemalloc.start()
    try:
        characters = sum(len(text) for text in read_texts(unit, "text", Counter(), Counter()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert characters > 11 * 10**6 and peak < 10**6


def test_progress_counts_what_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some words " * 10_000)
    seen = []
    real = tokenizing.tokenize_unit
    monkeypatch.setattr(
        tokenizing,
        "tokenize_unit",
        lambda job, unit, advance: real(job, unit, lambda n: seen.append(n) or advance(n)),
    )
    tokenize(str(tmp_path / "a.txt"), tmp_path / "out")
    assert len(seen) == 1 + 110_000 // (8 * LONGEST) and sum(seen) == pytest.approx(110_000, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines("x") + b"{'text': 1}\n", "a.jsonl, line 2: not a JSON object (Expecting"),
        (
            "a.jsonl",
            b'{"content": "x", "id": 3}\n',
            "a.jsonl: no key 'text' in its first 1 records; keys are content, id (--text-key)",
        ),
        (
            "a.jsonl",
            b'{"id": 1}\n\n' * 60 + b'{"meta": {"text": "x"}}\n' * 40 + lines("too late"),
            "a.jsonl: no key 'text' in its first 100 records; keys are id, meta (--text-key)",
        ),
        ("a.jsonl", lines("x") + b'["x"]\n', "a.jsonl, line 2: not a JSON object (an object is expected)"),
        ("a.jsonl", b'[\n{"text": "x"}\n]\n', "a.jsonl, line 1: not a JSON object (Expecting value: line 2 column 1"),
        ("a.jsonl", b'{"text": 12}\n', "a.jsonl, line 1: 'text' should hold text, not 12"),
        (
            "a.jsonl",
            b'{"text": "x", "a": {"text": 1}, "text": "y"}\n',
            "a.jsonl, line 1: not a JSON object ('text' twice)",
        ),
        ("a.csv", b"id;text\n1;x\n", "a.csv: no columns 'text'; columns are id;text (--text-key)"),
        ("a.csv", b"text,id,text\nx,1,y\n", "a.csv: 2 columns 'text'; columns are text, id, text (--text-key)"),
        ("a.csv", b"id,text\n1,x\n\n2,a, b\n", "a.csv, line 4: 3 fields, the header has 2; a text with a comma needs"),
        ("a.csv", b'id,text\n1,"x\ny"\n2,x,\n', "a.csv, line 4: 3 fields, the header has 2"),
        (
            "a.csv.gz",
            gzip.compress(b"id,text\n" + b"1,x\n" * 9 + b"2\n", mtime=0),
            "a.csv.gz, line 11: 1 fields, the header has 2",
        ),
        ("a.csv", b'id,text\n1,"open\n2,x\n', "a.csv, line 3: unexpected end of data"),
        ("a\udce9.txt", b"x", "a\udce9.txt: its name is not UTF-8; rename it"),
        ("a.txt", "x".encode("utf-16"), "a.txt: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
        ("a.txt.gz", b"no gzip", "a.txt.gz cannot be read: "),
        ("a.jsonl.gz", gzip.compress(lines("x") * 100_000, mtime=0)[:-2000], "a.jsonl.gz cannot be read: Truncated"),
        ("a.json.bz2", bz2.compress(lines("x") * 100_000)[:-20], "a.json.bz2 cannot be read: Truncated"),
        ("a.json.lz4", compressed(lines("x") * 100_000, "lz4")[:-2000], "a.json.lz4 cannot be read: Truncated"),
        ("a.json.xz", lzma.compress(lines("x") * 100_000)[:-20], "a.json.xz cannot be read: Compressed file ended"),
        ("a.json.xz", b"no xz", "a.json.xz cannot be read: "),
        (
            "a.json.zst",
            LONG_WINDOW,
            "a.json.zst cannot be read: ZSTD decompress failed: Frame requires too much memory for",
        ),
        ("a.arrow", b"no arrow", "a.arrow cannot be read: "),
        ("a.arrow", arrow_stream(text=["x"])[:-300], "a.arrow cannot be read: "),
        ("a.arrow", arrow_stream(body=["x"]), "a.arrow: no columns 'text'; columns are body (--text-key)"),
        ("a.arrow", arrow_stream(text=[1]), "a.arrow: column 'text' holds int64, not text (--text-key)"),
    ],
)
def test_mistakes_in_files_end_with_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        tokenize(str(tmp_path / name), tmp_path / "out")
    assert str(raised.value).removeprefix("--input ").startswith(str(tmp_path / message)) and "\n" not in str(
        raised.value
    )


TEXTS = [
    "", " ", "plain", 'a "quoted" word, and a comma', "two\nlines\r\nand\rmore\n\n", "\t; | '", "naïve 漢字 🙂", "\u2028 \x85 \x0b",
    "</s> <s>", "\\n \\u0041 \\", "NA", "null", "1.50", "x" * 70_000, "\ufffd", "\ufeffin front", "#", "{}",
]  # fmt: skip
FRAME = pd.DataFrame({"id": range(len(TEXTS)), "more": [[1, 2]] * len(TEXTS), "text": TEXTS})
ARROW = pa.Table.from_pandas(FRAME)
PLAIN = FRAME.drop(columns="more")


def read_json(file: Path) -> list[str]:
    return pd.read_json(file, lines=True, dtype=False)["text"].tolist()


def read_arrow_csv(file: Path) -> list[str]:
    convert = arrow_csv.ConvertOptions(column_types={"text": pa.string()}, strings_can_be_null=False)
    parse = arrow_csv.ParseOptions(newlines_in_values=True)
    return arrow_csv.read_csv(file, parse_options=parse, convert_options=convert)["text"].to_pylist()


def read_parquet(file: Path) -> list[str]:
    return pd.read_parquet(file)["text"].tolist()


def write_arrow(**options):
    return lambda file: pq.write_table(ARROW, file, **options)


WRITTEN = {
    "pandas.csv": (lambda file: PLAIN.to_csv(file, index=False), read_arrow_csv),
    "all-quoted.csv": (lambda file: PLAIN.to_csv(file, index=False, quoting=csv.QUOTE_ALL), read_arrow_csv),
    "windows.csv": (
        lambda file: PLAIN.to_csv(file, index=False, lineterminator="\r\n", encoding="utf-8-sig"), read_arrow_csv,
    ),
    "with-an-index.csv.gz": (lambda file: PLAIN.to_csv(file), read_arrow_csv),
    "arrow.csv": (lambda file: arrow_csv.write_csv(ARROW.drop_columns("more"), file), read_arrow_csv),
    "ascii.jsonl": (lambda file: FRAME.to_json(file, orient="records", lines=True), read_json),
    "utf-8.jsonl.gz": (lambda file: FRAME.to_json(file, orient="records", lines=True, force_ascii=False), read_json),
    "datasets.jsonl": (lambda file: Dataset.from_pandas(FRAME).to_json(file), read_json),
    "datasets.parquet": (lambda file: Dataset.from_pandas(FRAME).to_parquet(file), read_parquet),
    "categories.parquet": (lambda file: FRAME.astype({"text": "category"}).to_parquet(file), read_parquet),
    "polars-like.ndjson": (lambda file: FRAME.to_json(file, orient="records", lines=True), read_json),
    "footer.arrow": (lambda file: feather.write_feather(ARROW, file), lambda file: pd.read_feather(file)["text"].tolist()),
    "small-pages.parquet": (write_arrow(data_page_version="2.0", data_page_size=64, row_group_size=4), read_parquet),
    "delta.parquet": (
        write_arrow(use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}, compression="brotli"), read_parquet,
    ),
    "lengths.parquet": (
        write_arrow(use_dictionary=False, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"}, compression="zstd"),
        read_parquet,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_tables_written_by_other_programs_are_read_exactly(name, tmp_path):
    """The shards are compared with another reader of the file."""
    write, read = WRITTEN[name]
    file = tmp_path / name
    write(file)
    made = make_tokenizer(tmp_path / "letters")
    manifest = tokenize(str(file), tmp_path / "out", tokenizer=str(made), validation_fraction=0)
    expected = read(file)
    assert expected == TEXTS  # control: the other reader is right
    expected.remove("")  # an empty text is only counted
    own = Tokenizer.from_file(str(made / "tokenizer.json"))
    own.encode_special_tokens = True
    stored = [tokens.tolist() for tokens in read_documents(manifest, "train")]
    assert stored == [[256, *own.encode(text, add_special_tokens=False).ids, 257] for text in expected]
    assert [manifest.load_tokenizer().decode(ids[1:-1]) for ids in stored] == expected
    assert not manifest.source["replaced"] and manifest.source["left_out"] == {"documents without text": 1}


@pytest.mark.parametrize("columns", [["text"], ["id", "text"], ["text", "id"]])
@pytest.mark.parametrize("lineterminator", ["\n", "\r\n"])
def test_a_carriage_return_alone_is_text_in_csv(columns, lineterminator, tmp_path):
    """pandas does not quote it where lines end with a line feed, and Python's reader ends a row there."""
    texts = ["first\rsecond", "plain", "\rfront", "a\r\rb", 'quo"ted\rtext', "comma, and\rmore", "line\nand\rmore"]
    frame = pd.DataFrame({"id": range(len(texts)), "text": texts})[columns]
    frame.to_csv(tmp_path / "a.csv", index=False, lineterminator=lineterminator)
    assert texts_of(tmp_path / "a.csv") == texts


def test_csv_whose_lines_end_with_carriage_returns(tmp_path):
    (tmp_path / "old-mac.csv").write_bytes(b'id,text\r1,one\r2,"two\rlines"\r\r3,"and\nmore"\r')
    assert texts_of(tmp_path) == ["one", "two\rlines", "and\nmore"]


COLUMNS = {
    "string": (pa.string(), None), "large_string": (pa.large_string(), None), "string_view": (pa.string_view(), None),
    "binary": (pa.binary(), None), "large_binary": (pa.large_binary(), None), "binary_view": (pa.binary_view(), None),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), None),
    "dictionary of large strings": (pa.dictionary(pa.int8(), pa.large_string()), None),
    "int64": (pa.int64(), "column 'text' holds int64, not text"),
    "list": (pa.list_(pa.string()), "column 'text' holds list<"),
    "struct": (pa.struct({"a": pa.string()}), "column 'text' holds struct<"),
    "dictionary of numbers": (pa.dictionary(pa.int8(), pa.int64()), "column 'text' holds int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_every_type_of_text_are_read(name, tmp_path):
    kind, refusal = COLUMNS[name]
    values = ["one", None, "naïve", "one"] if refusal is None else None
    column = pa.array(values, pa.string()).cast(kind) if values else pa.nulls(2, kind)
    pq.write_table(pa.table({"id": pa.array(range(len(column))), "text": column}), tmp_path / "a.parquet")
    if refusal is None:
        assert texts_of(tmp_path / "a.parquet") == ["one", "naïve", "one"]
        return
    with pytest.raises(UserError, match=f"a.parquet: {refusal}"):
        texts_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("before", [0, 1, 99])
def test_a_record_without_the_key_is_a_document_without_text(before, tmp_path):
    """As datatrove and Spark write one whose text is empty or null; also in front of all others."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"id": 1}\n' * before + lines("one") + b'{"id": 2}\n\n{"id": 3, "text": ""}\n' + lines("two"))
    manifest = tokenize(str(file), tmp_path / "out", validation_fraction=0)
    assert manifest.documents("train") == 2 and manifest.source["left_out"] == {"documents without text": before + 2}


def test_data_sets_that_were_saved_to_disk_are_read(tmp_path):
    """As `load_from_disk` reads them: without the files that an earlier, larger one has left in the folder."""
    more = DatasetDict(
        train=Dataset.from_dict({"id": [*range(9)], "text": [f"old {i}" for i in range(9)]}),
        test=Dataset.from_dict({"text": ["never"]}),
    )
    more.save_to_disk(tmp_path / "in", num_shards={"train": 3, "test": 1})
    texts = [*(text for text in TEXTS if text), None, ""]
    saved = Dataset.from_dict({"text": texts * 300}).select(range(0, 300 * len(texts), 3))
    saved.save_to_disk(tmp_path / "in" / "train", num_shards=2)
    left_out = Counter()
    assert len(find_files([str(tmp_path / "in")], left_out)) == 2
    assert +left_out == {
        "of another split than train": 1, "describing a data set": 5, "of an older version of a data set": 3
    }  # fmt: skip
    read = load_from_disk(str(tmp_path / "in" / "train"))["text"]
    assert texts_of(tmp_path / "in") == [text for text in read if text]
    (tmp_path / "in" / "train" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="train/state.json does not list the files of a data set"):
        texts_of(tmp_path / "in")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet: 2 columns 'text'; columns are text, text"):
        texts_of(tmp_path / "a.parquet")


def test_folders_behind_links_are_read_once(tmp_path):
    for name in ("in/a.txt", "in/real/books/b.txt", "in/real/c.txt", "in/one.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for name, target in {
        "books": "in/real/books",
        "again": "in/real",
        "d.txt": "in/one.txt",
        "loop": "in",
        "gone": "in/none",
    }.items():
        (tmp_path / "in" / name).symlink_to(tmp_path / target)
    left_out = Counter()
    files = [Path(file).resolve() for file in find_files([str(tmp_path / "in")], left_out)]
    assert sorted(str(file.relative_to(tmp_path)) for file in files) == [
        "in/a.txt",
        "in/one.txt",
        "in/real/books/b.txt",
        "in/real/c.txt",
    ]
    assert +left_out == {"links to nothing": 1, "named twice": 1}


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, 0),
        ({"normalizer": {"type": "Lowercase"}}, 1),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "\n"}, "content": " "}}, 2),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}}, 0),
    ],
    ids=["bytes", "small letters", "no line ends", "no leading space"],
)
def test_texts_that_a_tokenizer_changes_are_counted(tmp_path, changes, changed):
    tokenizer = make_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | changes))
    (tmp_path / "a.jsonl").write_bytes(lines("one", "Two\nlines", "three\nlines", " four"))
    manifest = tokenize(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=str(tokenizer.parent))
    reason = "documents in part, by the tokenizer (of the first 200)"
    assert manifest.source["left_out"] == ({reason: changed} if changed else {})


def test_a_clone_of_a_data_set_gives_its_training_split(tmp_path, write_parquet):
    """As when it is named on the Hub; its card is not text."""
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA card.")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "validation-00000-of-00001"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", [name])
    (tmp_path / ".gitattributes").write_text("x")
    (tmp_path / "data" / "notes.md").write_text("notes")
    manifest = tokenize(str(tmp_path), tmp_path / "out")
    assert sorted(file["name"] for file in manifest.source["files"]) == [
        "notes.md", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"
    ]  # fmt: skip
    assert manifest.source["left_out"] == {"hidden": 1, "of another split than train": 2, "describing a data set": 1}
    # named themselves they are read
    for source in (tmp_path / "data" / "test-00000-of-00001.parquet", tmp_path / "README.md"):
        assert len(texts_of(source)) == 1


SPLIT_NAMES = {
    "train_0 train_1": "test_0 test0 val2017 dev2",
    "c4-train.00000-of-00002": "c4-validation.00000-of-00001 en/validation/0 en/c4-valid/0/part",
    "TinyStories-train": "TinyStories-valid Test VALID/a",
    "a train/a training/a my-training-data": "evaluation/a eval wiki.eval my-testing-data train/dev testing",
    "latest contest/a devices evaluated testament values validations détest": "",
    # words of a path, though not to `datasets`
    "split=train/part-0": "split=test/part-0 (test) a+dev",
}


@pytest.mark.parametrize("train", SPLIT_NAMES)
def test_files_of_other_splits_are_left_out(train, tmp_path):
    """Whatever their name has in front of the split's name and behind it; SPLIT_NAMES: {read: left out}."""
    folder = tmp_path / "test"  # named by the user, so its own name says nothing
    for name in (read := train.split()) + (others := SPLIT_NAMES[train].split()):
        (folder / f"{name}.jsonl").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_bytes(lines(name))
    assert sorted(texts_of(folder)) == sorted(read)
    left_out = Counter()
    find_files([str(folder)], left_out)
    assert +left_out == Counter({"of another split than train": len(others)})
    if others and "=" not in train:  # `datasets` finds most of them; the rest it would train on, or read nowhere
        found = load_dataset_builder(str(folder), cache_dir=str(tmp_path)).config.data_files
        files = [*found.get("validation", ()), *found.get("test", ())]
        theirs = {str(Path(file).relative_to(folder)).removesuffix(".jsonl") for file in files}
        assert theirs and theirs <= set(others)


def test_a_folder_of_other_splits_only_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA card.")
    (tmp_path / "test.jsonl").write_bytes(lines("x"))
    with pytest.raises(UserError, match="its files are of other splits than train, such as .*/test.jsonl; to train on"):
        texts_of(tmp_path)
    assert texts_of(tmp_path / "test.jsonl") == ["x"]


TABLES = {
    "a Delta Lake table": ("_delta_log/0.json", "lang=en/a.parquet"),
    "an Iceberg table": ("metadata/00001-x.metadata.json", "data/a.parquet"),
    "a Hudi table": (".hoodie/hoodie.properties", "2026/a.parquet"),
    "written by a stream of Spark": ("_spark_metadata/0", "part/a.parquet"),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_whose_log_says_what_belongs_to_it_is_refused(what, tmp_path, write_parquet):
    """Its files also hold deleted rows and old versions."""
    log, part = TABLES[what]
    file = write_parquet(tmp_path / "in" / "table" / part, ["deleted"])
    place = tmp_path / "in" / "table" / log
    place.parent.mkdir()
    place.write_text("{}")
    (tmp_path / "link").symlink_to(file.parent)
    for source in (tmp_path / "in" / "table", tmp_path / "in", file.parent, tmp_path / "link"):
        with pytest.raises(UserError, match=f"^--input {tmp_path}/in/table: is {what}, whose files .*; export it"):
            texts_of(source)
    assert texts_of(file) == ["deleted"]  # named itself
    shutil.rmtree(place.parent)
    (tmp_path / "in" / "metadata").mkdir()
    (tmp_path / "in" / "metadata" / "notes.txt").write_text("control")
    assert texts_of(tmp_path / "in") == ["control", "deleted"]


def test_other_keys_and_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "b.csv").write_text("body\ny\n")
    assert texts_of(tmp_path, text_key="body") == ["x", "y"]


def test_small_data_give_more_to_validation(tmp_path, make_texts):
    assert [validation_share(size) for size in (10**5, 10**8, 10**12)] == [0.1, 0.02, 0.0005]
    (tmp_path / "a.jsonl").write_bytes(lines(*make_texts(939, seed=1)))
    manifest = tokenize(str(tmp_path / "a.jsonl"), tmp_path / "out")
    # 939 draws at 0.1: 94, standard deviation 9; at 0.0005, as for large data, 0.5
    assert 94 - 5 * 9 < manifest.documents("validation") < 94 + 5 * 9


@pytest.mark.parametrize(
    "name", ["~.txt", "[ok].txt", "a*b.txt", "ok%2e.txt", "C: ok.csv", "[ok].jsonl.gz", "a*b.parquet"]
)
def test_a_local_file_may_have_any_name(name, tmp_path, monkeypatch):
    """Even one that looks like a pattern, by a relative or an absolute path. No name but hf://... is an address."""
    monkeypatch.chdir(tmp_path)
    for function in ("open", "open_files", "filesystem", "url_to_fs"):
        monkeypatch.setattr(f"fsspec.{function}", None)
    Path("ok.txt").write_text("another file")
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": [name]}), tmp_path / name)
    elif name.endswith(".gz"):
        Path(name).write_bytes(gzip.compress(json.dumps({"text": name}).encode()))
    else:
        Path(name).write_text(f"text\n{name}\n" if name.endswith(".csv") else name)
    for source in (name, str(tmp_path / name)):
        files = measure_files(find_files([source], Counter()), "text")
        (unit,) = divide_into_units(files, 1e9)
        assert [text.strip() for text in read_texts(unit, "text", Counter(), Counter())] == [name]
        assert files[0].size == Path(name).stat().st_size
