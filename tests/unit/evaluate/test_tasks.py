"""lm-eval's own tasks on local documents, without a network."""

import socket
from typing import get_args

import pytest

from pc import UserError
from pc_recipe.config.schema import Task
from pc_recipe.evaluate import tasks


def test_nine_zero_shot_tasks_on_local_documents(evaluation_data, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    loaded = tasks.load(list(tasks.METRICS), evaluation_data)["tasks"]
    assert list(loaded) == list(tasks.METRICS)
    for name, task in loaded.items():
        task.build_all_requests(rank=0, world_size=1, cache_requests=False, rewrite_requests_cache=False)
        assert len(task.eval_docs) == 3
        assert tasks.METRICS[name] in task.aggregation()
        assert task.config.num_fewshot == 0


def test_the_configuration_knows_them_all():
    assert set(get_args(Task)) == set(tasks.METRICS)


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
        tasks.load(["piqa"], tmp_path)
