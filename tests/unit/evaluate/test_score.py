"""One command scores several models, saves the results, and repeats nothing."""

import json
from pathlib import Path

import pytest

from pc import UserError
from pc.evaluate import hugging_face, score, tasks

NAMES = ["piqa", "arc_easy"]


@pytest.fixture
def count_loads(monkeypatch):
    """Names of the models that were really loaded."""
    loaded = []
    load = hugging_face.load

    def counting(path, tokenizer=None):
        loaded.append(path.name)
        return load(path, tokenizer)

    monkeypatch.setattr(hugging_face, "load", counting)
    return loaded


def run(models, output, data, **settings):
    return score.score(models, output=output, data=data, device="cpu", **({"names": NAMES} | settings))


def test_checkpoint_and_its_export_score_alike(pc_run, pc_export, evaluation_data, tmp_path):
    first, second = run([f"run={pc_run.checkpoint}", f"export={pc_export}"], tmp_path, evaluation_data)
    one, other = (json.loads(path.read_text()) for path in (first, second))
    for name in NAMES:
        for key in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "items", "version"):
            assert one["tasks"][name][key] == other["tasks"][name][key]
    assert one["versions"]["lm_eval"].startswith("0.4.")
    assert "commit" in one["tasks"]["piqa"]
    assert {path.name for path in tmp_path.iterdir()} >= {"table.md", "table.csv", "table.png"}


def test_finished_tasks_are_not_repeated(pc_export, plain_run, evaluation_data, tmp_path, count_loads):
    run([str(pc_export)], tmp_path, evaluation_data, names=["piqa"])
    before = json.loads((tmp_path / "pc.json").read_text())
    run([str(pc_export), f"plain={plain_run.checkpoint}"], tmp_path, evaluation_data)
    run([str(pc_export), f"plain={plain_run.checkpoint}"], tmp_path, evaluation_data)
    assert count_loads == ["pc", "pc", "step-7"]  # again for arc_easy; not for the third call
    assert json.loads((tmp_path / "pc.json").read_text())["tasks"]["piqa"] == before["tasks"]["piqa"]


def test_a_crash_keeps_finished_tasks(pc_export, evaluation_data, tmp_path, monkeypatch):
    load = tasks.load

    def crash(names, *others):
        if names == ["arc_easy"]:
            raise KeyboardInterrupt
        return load(names, *others)

    monkeypatch.setattr(tasks, "load", crash)
    with pytest.raises(KeyboardInterrupt):
        run([str(pc_export)], tmp_path, evaluation_data)
    assert list(json.loads((tmp_path / "pc.json").read_text())["tasks"]) == ["piqa"]


def test_another_model_or_set_under_the_same_name_is_scored_anew(pc_export, plain_run, evaluation_data, tmp_path):
    run([f"x={pc_export}"], tmp_path, evaluation_data, names=["piqa"])
    first = json.loads((tmp_path / "x.json").read_text())
    run([f"x={plain_run.checkpoint}"], tmp_path, evaluation_data, names=["piqa"])
    second = json.loads((tmp_path / "x.json").read_text())
    assert first["model_sha256"] != second["model_sha256"]

    shorter = tmp_path / "shorter"
    shorter.mkdir()
    lines = (evaluation_data / "piqa.jsonl").read_text().splitlines(keepends=True)
    (shorter / "piqa.jsonl").write_text("".join(lines[:2]))
    run([f"x={plain_run.checkpoint}"], tmp_path, shorter, names=["piqa"])
    assert json.loads((tmp_path / "x.json").read_text())["tasks"]["piqa"]["items"] == 2


def test_a_limit_is_kept_apart_and_marked(pc_export, evaluation_data, tmp_path):
    (path,) = run([str(pc_export)], tmp_path, evaluation_data, limit=1)
    assert path.name == "pc.limit-1.json"
    found = json.loads(path.read_text())
    assert (found["tasks"]["piqa"]["items"], found["tasks"]["piqa"]["items_in_set"]) == (1, 3)
    assert "PARTIAL" in (tmp_path / "table.limit-1.md").read_text()
    assert not (tmp_path / "table.md").exists()


def test_a_task_that_is_named_twice_counts_once(pc_export, evaluation_data, tmp_path):
    run([str(pc_export)], tmp_path / "once", evaluation_data, names=["piqa"])
    run([str(pc_export)], tmp_path / "twice", evaluation_data, names=["piqa", "piqa"])
    assert (tmp_path / "twice" / "table.md").read_text() == (tmp_path / "once" / "table.md").read_text()


def test_an_answer_longer_than_the_model_does_not_end_the_scoring(pc_export, tmp_path, caplog):
    item = {"goal": "Dry a wet shoe", "sol1": "Fill it. " * 200, "sol2": "Fill it with water.", "label": 1}
    (tmp_path / "piqa.jsonl").write_text(json.dumps(item) + "\n")
    (path,) = run([str(pc_export)], tmp_path / "out", tmp_path, names=["piqa"])
    assert json.loads(path.read_text())["tasks"]["piqa"]["items"] == 1
    assert "1 of piqa; only their last 256 tokens are scored" in caplog.text


def test_names_and_paths_may_contain_equals_signs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("level-o=4+ffn=2/checkpoint/step-16")
    path.mkdir(parents=True)
    for text, name in [
        (f"{path}", "level-o=4+ffn=2 step-16"),
        (f"mine={path}", "mine"),
        (f"lr=1={path}", "lr=1"),
    ]:
        assert score.Model.parse(text) == score.Model(name, path)
    with pytest.raises(UserError, match=r"^level-o=4\+ffn=2/checkpoint/step-17: no such model"):
        score.Model.parse("level-o=4+ffn=2/checkpoint/step-17")


def test_mistakes(pc_export, evaluation_data, tmp_path):
    for models, settings, message in [
        (["nowhere"], {}, "nowhere: no such model"),
        ([str(pc_export)], {"names": ["mmlu"]}, "unknown task 'mmlu'"),
        ([str(pc_export)], {"limit": 0}, "--limit 0 should be at least 1"),
        ([str(pc_export), str(pc_export)], {}, "two models are called 'pc'"),
        ([str(tmp_path)], {}, "not a checkpoint"),
    ]:
        with pytest.raises(UserError, match=message):
            run(models, tmp_path / "out", evaluation_data, **settings)
