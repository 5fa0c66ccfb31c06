"""lm-eval's own tasks on local documents, without a network."""

import json
import socket
from pathlib import Path

import pytest

from pc import UserError
from pc_recipe.evaluate import tasks


def test_nine_zero_shot_tasks_on_local_documents(evaluation_data, monkeypatch, tmp_path, request):
    asked = []

    def refuse(*address, **__):
        asked.append(address)  # a library may continue without an answer
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    request.addfinalizer(lambda: asked and pytest.fail(f"asked the network: {asked}"))
    monkeypatch.chdir(tmp_path)  # a folder in which names of data sets and modules are other files
    for name in ("json", "lm_eval", "datasets", "Rowan/hellaswag", "utils"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("__init__.py", f"{Path(name).name}.py", "utils.py", "data.jsonl"):
            (tmp_path / name / file).write_text("raise SystemExit(__file__)\n")
    for name in tasks.METRICS:
        task = tasks.load(name, evaluation_data)["tasks"][name]
        task.build_all_requests(rank=0, world_size=1, cache_requests=False, rewrite_requests_cache=False)
        assert len(task.eval_docs) == 3
        assert tasks.METRICS[name] in task.aggregation()
        assert task.config.num_fewshot == 0


def test_odd_line_ends_in_an_item_are_text(tmp_path):
    item = {"goal": "a\u2028b\x85c", "sol1": "d", "sol2": "e", "label": 0}
    (tmp_path / "piqa.jsonl").write_text(json.dumps(item, ensure_ascii=False) + "\n")
    (loaded,) = tasks.load("piqa", tmp_path)["tasks"].values()
    assert loaded.eval_docs[0] == item


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"missing; create the folder with scripts/fetch_eval_data\.py"),
        ("{not json\n", "not JSON lines of piqa"),
        ('{"goal": "a"}\n', "not JSON lines of piqa"),
    ],
)
def test_broken_set(tmp_path, content, message):
    if content:
        (tmp_path / "piqa.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"piqa\.jsonl: {message}"):
        tasks.load("piqa", tmp_path)
