"""One command scores several models, saves the results, and repeats nothing."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from pc import UserError
from pc_recipe.evaluate import hugging_face, score, tasks
from pc_recipe.files.run_folder import CHECKSUMS

NAMES = ["piqa", "arc_easy"]


@pytest.fixture
def loads(monkeypatch):
    """Names of the models that were really loaded."""
    loaded = []
    load = hugging_face.load
    monkeypatch.setattr(hugging_face, "load", lambda path: loaded.append(path.name) or load(path))
    return loaded


def run(models, output, data, **settings):
    return score.score(models, output=output, data=data, **({"names": NAMES} | settings))


def read(path):
    return json.loads(Path(path).read_text())


def test_finished_tasks_are_not_repeated(pc_export, plain_run, evaluation_data, tmp_path, loads, monkeypatch):
    load = tasks.load

    def crash(name, *others):
        if name == "arc_easy":
            raise KeyboardInterrupt
        return load(name, *others)

    with monkeypatch.context() as crashing, pytest.raises(KeyboardInterrupt):
        crashing.setattr(tasks, "load", crash)
        run([str(pc_export)], tmp_path, evaluation_data)
    before = read(tmp_path / "pc.json")["tasks"]
    assert list(before) == ["piqa"]
    for _ in range(2):
        run([str(pc_export), f"plain={plain_run.checkpoint}"], tmp_path, evaluation_data)
        assert loads == ["pc", "pc", "step-7"]  # "pc" is loaded again for arc_easy, but not in the third call
    assert read(tmp_path / "pc.json")["tasks"]["piqa"] == before["piqa"]


def test_another_model_or_set_under_the_same_name_is_scored_anew(pc_export, plain_run, evaluation_data, tmp_path):
    run([f"x={pc_export}"], tmp_path, evaluation_data, names=["piqa"])
    first = read(tmp_path / "x.json")
    run([f"x={plain_run.checkpoint}"], tmp_path, evaluation_data, names=["piqa"])
    assert first["model_sha256"] != read(tmp_path / "x.json")["model_sha256"]
    (tmp_path / "shorter").mkdir()
    lines = (evaluation_data / "piqa.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "shorter" / "piqa.jsonl").write_text("".join(lines[:2]))
    run([f"x={plain_run.checkpoint}"], tmp_path, tmp_path / "shorter", names=["piqa"])
    assert read(tmp_path / "x.json")["tasks"]["piqa"]["items"] == 2


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt"])
def test_a_folder_whose_tokenizer_was_changed_is_scored_anew(name, tmp_path):
    known = set()
    for content in ("one", "two"):
        (tmp_path / name).write_text(content)
        for said in ("scored", "praised"):  # the README has no effect
            (tmp_path / "README.md").write_text(said)
            known.add(score._sha256_of_model(tmp_path))
    assert len(known) == 2


def test_nothing_is_read_from_a_folder_with_a_socket(pc_export, evaluation_data, tmp_path):
    model = shutil.copytree(pc_export, tmp_path / "model")
    os.mknod(model / "vocab.txt", stat.S_IFSOCK)
    with pytest.raises(UserError, match=r"vocab\.txt is a pipe"):
        run([str(model)], tmp_path / "out", evaluation_data)


def test_a_checkpoint_is_known_by_its_checksums(plain_run, evaluation_data, tmp_path, monkeypatch):
    """Its files are not hashed: they may have 14 GiB, and loading verifies them anyway."""
    hashed = []
    real = score.sha256_of
    monkeypatch.setattr(score, "sha256_of", lambda path: hashed.append(Path(path).name) or real(path))
    run([f"x={plain_run.checkpoint}"], tmp_path, evaluation_data, names=["piqa"])
    assert hashed == ["piqa.jsonl", CHECKSUMS]
    assert any(plain_run.checkpoint.glob("*.distcp"))


def test_results_with_a_limit_are_kept_apart_and_marked(pc_export, evaluation_data, tmp_path):
    path, table = run([str(pc_export)], tmp_path, evaluation_data, limit=1, names=["piqa", "piqa"])
    assert path.name == "pc.limit-1.json"
    found = read(path)["tasks"]["piqa"]
    assert (found["items"], found["items_in_set"], found["acc_stderr"]) == (1, 3, None)
    assert table.name == "table.limit-1.md" and "PARTIAL" in table.read_text()
    assert not (tmp_path / "table.md").exists()


def test_mistakes(pc_export, evaluation_data, tmp_path):
    for models, settings, message in [
        (["nowhere"], {}, "nowhere: no such model"),
        ([str(pc_export)], {"names": ["mmlu"]}, "mmlu: tasks are lambada_openai, hellaswag"),
        ([str(pc_export)], {"names": []}, "no task: tasks are"),
        ([str(pc_export), str(pc_export)], {}, "two models are called 'pc'"),
    ]:
        with pytest.raises(UserError, match=message):
            run(models, tmp_path / "out", evaluation_data, **settings)


@pytest.mark.parametrize("content", ["[]", "null", "{", "\0" * 40, "{}", '{"tasks": []}'])
def test_results_of_another_form_are_a_line_before_anything_is_scored(
    pc_export, evaluation_data, tmp_path, loads, content
):
    (tmp_path / "second.json").write_text(content)
    with pytest.raises(UserError, match=r"second.json: damaged, or of another form"):
        run([f"first={pc_export}", f"second={pc_export}"], tmp_path, evaluation_data)
    assert not loads and (tmp_path / "second.json").read_text() == content


@pytest.mark.parametrize("missing", ["acc", "acc_stderr"])
def test_a_task_without_its_score_is_scored_anew(pc_export, evaluation_data, tmp_path, missing):
    (file, _) = run([str(pc_export)], tmp_path, evaluation_data, names=["piqa"])
    whole, cut = read(file), read(file)
    del cut["tasks"]["piqa"][missing]
    file.write_text(json.dumps(cut))
    run([str(pc_export)], tmp_path, evaluation_data, names=["piqa"])
    assert read(file) == whole


def test_a_folder_with_the_name_of_a_set_is_not_scored_as_the_hubs(pc_export, tmp_path, monkeypatch, loads):
    monkeypatch.chdir(tmp_path)
    for name in tasks.PAPERS:
        assert tasks.hub_set(name) == "hub"
    (tmp_path / "baber" / "piqa").mkdir(parents=True)
    with pytest.raises(UserError, match="baber/piqa is also a folder here"):
        run([str(pc_export)], tmp_path / "out", None)
    assert not loads
