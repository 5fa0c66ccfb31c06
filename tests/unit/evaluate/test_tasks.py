"""lm-eval's own tasks on local documents, without a network."""

import socket
from typing import get_args

import datasets
import pytest

from pc import UserError
from pc.evaluate import tasks
from pc.settings.schema import Task

PROMPTS = {
    "lambada_openai": (
        "He looked for the key in every drawer, and at last beside the lamp he found the",
        " key",
    ),
    "hellaswag": ("Baking bread: A man kneads the dough. Then he", " puts it into the oven."),
    "winogrande": ("The cup did not fit the box because the cup", " was too big."),
    "piqa": ("Question: Dry a wet shoe\nAnswer:", " Fill it with newspaper."),
    "boolq": (
        "Rivers -- A river carries water to the sea.\nQuestion: does a river carry water?\nAnswer:",
        " no",
    ),
    "arc_easy": ("Question: Which of these is a metal?\nAnswer:", " iron"),
    "arc_challenge": ("Question: What turns water into steam?\nAnswer:", " light"),
    "commonsense_qa": (
        "Question: Where does one keep milk?\nA. fridge\nB. garage\nC. desk\nD. lake\nE. bag\nAnswer:",
        " A",
    ),
    "openbookqa": ("A plant grows towards", " light"),
}


def test_prompts_are_lm_evals(evaluation_data, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    loaded = tasks.load(list(tasks.METRICS), evaluation_data)["tasks"]
    assert list(loaded) == list(tasks.METRICS)
    for name, task in loaded.items():
        task.build_all_requests(rank=0, world_size=1, cache_requests=False, rewrite_requests_cache=False)
        assert len(task.eval_docs) == 3
        assert task.instances[0].args == PROMPTS[name]
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


def test_hub_out_of_reach(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"piqa cannot be loaded from the Hub \(.*Couldn't reach the Hub.*--data"):
        tasks.load(["piqa"], None)
