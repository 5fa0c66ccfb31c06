"""lm-eval's own tasks on local documents, without a network."""

import json
import socket

import pytest

from pc import UserError
from pc.evaluate import tasks

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


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_prompts_are_lm_evals(evaluation_data, no_network):
    loaded = tasks.load(list(tasks.METRICS), evaluation_data)["tasks"]
    assert list(loaded) == list(tasks.METRICS)
    for name, task in loaded.items():
        task.build_all_requests(rank=0, world_size=1, cache_requests=False, rewrite_requests_cache=False)
        assert len(task.eval_docs) == 3
        assert task.instances[0].args == PROMPTS[name]
        assert tasks.METRICS[name] in task.aggregation()
        assert task.config.num_fewshot == 0


def test_unknown_task():
    with pytest.raises(UserError, match="unknown task 'mmlu'; tasks are lambada_openai, hellaswag"):
        tasks.load(["piqa", "mmlu"], None)
    with pytest.raises(UserError, match="no task given"):
        tasks.load([], None)


def test_missing_set(tmp_path):
    with pytest.raises(UserError, match=r"piqa\.jsonl: missing; create the folder with scripts/fetch_eval_data\.py"):
        tasks.load(["piqa"], tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{not json\n", "not JSON lines"), ('{"goal": "a"}\n', "does not have the columns of piqa")],
)
def test_broken_set(tmp_path, content, message):
    (tmp_path / "piqa.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"piqa\.jsonl: {message}"):
        tasks.load(["piqa"], tmp_path)


def test_only_the_items_that_are_scored_are_checked(evaluation_data, tmp_path):
    """Rendering all items of the nine sets takes 20 seconds."""
    items = (evaluation_data / "piqa.jsonl").read_text().splitlines()
    faulty = json.dumps(json.loads(items[2]) | {"label": 7})
    (tmp_path / "piqa.jsonl").write_text("\n".join([*items[:2], faulty]) + "\n")
    assert tasks.load(["piqa"], tmp_path, limit=2)
    with pytest.raises(UserError, match=r"piqa\.jsonl: item 3 is not an item of piqa .*7 is not among its 2 choices"):
        tasks.load(["piqa"], tmp_path, limit=3)


def test_hub_out_of_reach(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"piqa cannot be loaded from the Hub \(Couldn't reach the Hub\).*--data"):
        tasks.load(["piqa"], None)
