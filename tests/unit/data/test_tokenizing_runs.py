"""Splitting of the work, repeats, and all faults of input and disk."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from pc.data import Manifest, build_dataloader, require_same_tokenizer, tokenizing
from pc.data.sources import find_files, find_hub_files, open_parquet, plan_units, read_footers
from pc.data.tokenizing import tokenize
from pc.errors import UserError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_units_cover_each_row_once(parquet_folder):
    files = read_footers(find_files(str(parquet_folder)), "text")
    for unit_bytes in (1, 3000, 10**9):
        units = plan_units(files, unit_bytes)
        assert [unit.number for unit in units] == list(range(len(units)))
        for file in files:
            mine = [unit for unit in units if unit.file == file.file]
            groups = [g for unit in mine for g in range(unit.first_row_group, unit.end_row_group)]
            assert groups == list(range(len(file.row_groups)))
            assert sum(unit.rows for unit in mine) == file.rows == 80
    assert len(plan_units(files, 1)) == 15 and len(plan_units(files, 10**9)) == 5


@pytest.mark.parametrize("how", ["two processes", "parts", "parts twice"])
def test_any_division_of_the_work_gives_the_same_bytes(how, parquet_folder, shards, tmp_path):
    arguments = {"source": str(parquet_folder), "output": tmp_path, "validation_fraction": 0.2}
    if how == "two processes":
        tokenize(**arguments, processes=2)
    else:
        parts = [(0, 3), (1, 3), (2, 3)] if how == "parts" else [(0, 2), (0, 2), (1, 2)]
        results = [tokenize(**arguments, part=part) for part in parts]
        assert [result is None for result in results] == [True, True, False]
    assert contents(tmp_path) == contents(shards.folder)


def test_repeat_makes_only_what_is_missing(parquet_folder, tmp_path, monkeypatch):
    manifest = tokenize(str(parquet_folder), tmp_path)
    before = contents(tmp_path)
    (tmp_path / manifest.shards["train"][2].tokens_file).unlink()  # lost
    shortened = tmp_path / manifest.shards["train"][3].offsets_file
    shortened.write_bytes(shortened.read_bytes()[:-5])  # cut off
    (tmp_path / "units" / "00004.json").write_text("{")  # half written by something else
    (tmp_path / "train" / ".00002.tokens.npy.left").write_bytes(b"half")  # of a killed process
    (tmp_path / "manifest.json").unlink()
    done = []
    real = tokenizing.tokenize_unit
    monkeypatch.setattr(tokenizing, "tokenize_unit", lambda *a: done.append(a[2].number) or real(*a))
    tokenize(str(parquet_folder), tmp_path)
    assert done == [2, 3, 4] and contents(tmp_path) == before
    tokenize(str(parquet_folder), tmp_path)
    assert done == [2, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.1}, "validation_fraction = 0.0005, this command has 0.1"),
        ({"shard_megabytes": 1}, "shard_megabytes"),
        ({"text_column": "id"}, "text_column"),
        ({"source": "elsewhere"}, "source"),
        ({"tokenizer": "other.model"}, "tokenizer"),
    ],
)
def test_other_settings_are_not_taken_for_finished(change, message, parquet_folder, tmp_path, mangled_model):
    tokenize(str(parquet_folder), tmp_path / "out")
    if "tokenizer" in change:
        change = {"tokenizer": str(mangled_model)}
    with pytest.raises(UserError, match=message):
        tokenize(**{"source": str(parquet_folder), "output": tmp_path / "out"} | change)


def _a_new_file(folder: Path) -> None:
    (folder / "c.jsonl").write_text('{"text": "three"}\n')


def _a_longer_file(folder: Path) -> None:
    (folder / "b.jsonl").write_text('{"text": "two and more"}\n')


def _a_lost_file(folder: Path) -> None:
    (folder / "a.jsonl").unlink()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_a_new_file, r"{source}/c\.jsonl is new; choose another --output"),
        (_a_longer_file, r"{source}/b\.jsonl has 25 bytes, then it had 16; choose another --output"),
        (_a_lost_file, r"a\.jsonl is gone; choose another --output"),
    ],
)
def test_other_files_are_not_taken_for_finished(change, message, finished, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name, text in (("a", "one"), ("b", "two")):
        (source / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    tokenize(str(source), tmp_path / "out", part=(0, 1 if finished else 2))
    change(source)
    with pytest.raises(
        UserError, match=f"out was started with other files of {source}: " + message.format(source=source)
    ):
        tokenize(str(source), tmp_path / "out")


def test_finished_work_needs_its_input_no_more(tmp_path):
    source = tmp_path / "in"
    output = source / "out"  # its JSON files are not taken for new input
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "one"}\n')
    manifest = tokenize(str(source), output)
    assert tokenize(str(source), output) == manifest
    (source / "a.jsonl").unlink()
    assert tokenize(str(source), output) == manifest
    output.rename(tmp_path / "out")
    source.rmdir()
    assert tokenize(str(source), tmp_path / "out").tokens("train") == manifest.tokens("train")


@pytest.fixture
def mangled_model(tmp_path) -> Path:
    """The default model with two tokens exchanged."""
    from sentencepiece import sentencepiece_model_pb2

    from pc.data.tokenizers import _mistral_model

    model = sentencepiece_model_pb2.ModelProto.FromString(_mistral_model().read_bytes())
    a, b = model.pieces[5000], model.pieces[6000]
    a.piece, b.piece = b.piece, a.piece
    path = tmp_path / "other.model"
    path.write_bytes(model.SerializeToString())
    return path


def test_two_tokenizers_in_one_run_are_refused(parquet_folder, shards, tmp_path, mangled_model):
    other = tokenize(str(parquet_folder), tmp_path / "out", tokenizer=str(mangled_model))
    require_same_tokenizer(shards, shards)
    with pytest.raises(UserError, match="one run needs one tokenizer"):
        require_same_tokenizer(shards, other)


class TestBadInput:
    def test_missing_column(self, tmp_path, write_parquet):
        file = write_parquet(tmp_path / "in.parquet", ["x"], column="content")
        with pytest.raises(UserError, match=r"in.parquet has no column 'text'; it has id, content"):
            tokenize(str(file), tmp_path / "out")
        assert tokenize(str(file), tmp_path / "out", text_column="content").documents("train") == 1

    def test_column_of_numbers(self, tmp_path, write_parquet):
        file = write_parquet(tmp_path / "in.parquet", ["x"])
        with pytest.raises(UserError, match="column 'id' of .*in.parquet holds int64, not text"):
            tokenize(str(file), tmp_path / "out", text_column="id")

    def test_file_that_is_no_parquet(self, tmp_path):
        (tmp_path / "in.parquet").write_bytes(b"nothing of the kind")
        with pytest.raises(UserError, match="in.parquet is not a readable parquet file"):
            tokenize(str(tmp_path), tmp_path / "out")

    def test_file_damaged_in_the_middle(self, tmp_path, write_parquet, make_texts):
        file = write_parquet(tmp_path / "in.parquet", make_texts(500, 1), compression="zstd")
        content = bytearray(file.read_bytes())
        content[2000:4000] = bytes(2000)
        file.write_bytes(content)
        with pytest.raises(UserError, match="in.parquet cannot be read to its end"):
            tokenize(str(file), tmp_path / "out")
        with pytest.raises(UserError, match="is not finished"):
            Manifest.read(tmp_path / "out")

    @pytest.mark.parametrize("source", ["nowhere/at/all", "missing.parquet", "*.parquet", "."])
    def test_nothing_there(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match="--input"):
            tokenize(source, tmp_path / "out")

    def test_subset_of_local_files(self, parquet_folder, tmp_path):
        with pytest.raises(UserError, match="--subset"):
            tokenize(str(parquet_folder), tmp_path, subset="sample-10BT")

    @pytest.mark.parametrize("settings", [{"validation_fraction": 1.0}, {"shard_megabytes": 0}])
    def test_settings_out_of_range(self, settings, parquet_folder, tmp_path):
        with pytest.raises(UserError, match="must be"):
            tokenize(str(parquet_folder), tmp_path, **settings)


def test_too_little_disk_space_is_said_beforehand(parquet_folder, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(tokenizing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="needs about"):
        tokenize(str(parquet_folder), tmp_path)


def _tokenize_with_small_files(source: str, output: str, queue) -> None:
    # A limit on file size makes the operating system refuse the write, as a full disk does.
    import resource

    unlimited = tokenizing._run

    def run_limited(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        unlimited(*arguments)

    tokenizing._run = run_limited  # so that the plan is still written
    try:
        tokenize(source, output)
        queue.put("no error")
    except UserError as error:
        queue.put(str(error))


def test_disk_full_in_the_middle(parquet_folder, shards, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_tokenize_with_small_files, args=(str(parquet_folder), str(tmp_path), queue))
    process.start()
    message = queue.get(timeout=60)
    process.join(60)
    assert "could not write" in message and str(tmp_path / "train" / "00000.tokens.npy") in message
    with pytest.raises(UserError, match="is not finished"):
        build_dataloader(
            tmp_path,
            seq_len=8,
            local_batch_size=1,
            dp_rank=0,
            dp_world_size=1,
            seed=0,
            vocab_size=32000,
            infinite=True,
        )
    assert not list(tmp_path.rglob(".*")) and not list(tmp_path.rglob("*.npy"))
    tokenize(str(parquet_folder), tmp_path)  # with free space the repeat completes
    assert Manifest.read(tmp_path).tokens("train") > 0


def test_killed_process_is_reported_instead_of_waited_for(parquet_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "_work", _kill_myself)
    with pytest.raises(UserError, match="process was killed"):
        tokenize(str(parquet_folder), tmp_path, processes=2)


def _kill_myself(unit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_hub_subset_gives_its_files(tmp_path, write_parquet):
    # A folder laid out like a dataset repository on the Hub, which is read by the same function.
    for name in ("sample/10BT/000.parquet", "sample/10BT/001.parquet", "data/CC-MAIN-2023-50/000.parquet"):
        write_parquet(tmp_path / name, ["x"])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n"
        "- config_name: CC-MAIN-2023-50\n  data_files:\n  - split: train\n    path: data/CC-MAIN-2023-50/*\n"
        "---\n"
    )
    files = find_hub_files(str(tmp_path), "sample-10BT")
    assert [Path(file).relative_to(tmp_path).as_posix() for file in files] == [
        "sample/10BT/000.parquet",
        "sample/10BT/001.parquet",
    ]
    with pytest.raises(UserError, match="no-such-subset"):
        find_hub_files(str(tmp_path), "no-such-subset")


def test_remote_files_are_read_like_local_ones(parquet_folder):
    file = parquet_folder / "part-0.parquet"
    with open_parquet(f"file://{file}") as remote, open_parquet(str(file)) as local:
        assert remote.read().equals(local.read())
    assert read_footers([f"file://{file}"], "text")[0].summary() == read_footers([str(file)], "text")[0].summary()


def test_manifest_says_what_was_done(shards, parquet_folder):
    content = json.loads((shards.folder / "manifest.json").read_text())
    assert content["source"]["input"] == str(parquet_folder) and len(content["source"]["files"]) == 5
    assert content["splits"]["train"]["documents"] + content["splits"]["validation"]["documents"] == 400
    assert "0.2" in content["split_rule"] and content["tokenizer"]["vocab_size"] == 32000
    assert Manifest.read(shards.folder) == shards
    assert shards.load_tokenizer().sha256 == shards.tokenizer.sha256
