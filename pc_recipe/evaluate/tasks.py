"""The nine zero-shot tasks of the paper, as lm-eval defines them, from the Hub or from local JSON lines."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import lm_eval
from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from pc.errors import UserError
from pc_recipe.files import look

# Each task's name in tables, metric, and folder in lm-eval's package. Metrics are those of the paper's
# table of downstream evaluation: accuracy, normalised by length where the paper does so.
_Task = tuple[str, Literal["acc", "acc_norm"], str]
_PAPERS: dict[str, _Task] = {
    "lambada_openai": ("LAMBADA", "acc", "lambada"),
    "hellaswag": ("HellaSwag", "acc_norm", "hellaswag"),
    "winogrande": ("WinoGrande", "acc", "winogrande"),
    "piqa": ("PIQA", "acc", "piqa"),
    "boolq": ("BoolQ", "acc", "super_glue/boolq"),
    "arc_easy": ("ARC-E", "acc_norm", "arc"),
    "arc_challenge": ("ARC-C", "acc_norm", "arc"),
    "commonsense_qa": ("CSQA", "acc", "commonsense_qa"),
    "openbookqa": ("OBQA", "acc_norm", "openbookqa"),
}
_OTHERS: dict[str, _Task] = {}  # scored where --tasks names them; the paper's average is without them
_TASKS = _PAPERS | _OTHERS
PAPERS = tuple(_PAPERS)
SHORT_NAMES = {task: name for task, (name, _, _) in _TASKS.items()}
METRICS = {task: metric for task, (_, metric, _) in _TASKS.items()}


def require_known(names: Sequence[str]) -> None:
    if not names or set(names) - METRICS.keys():
        raise UserError(f"{', '.join(names) or 'no task'}: tasks are {', '.join(METRICS)}")


def data_file(name: str, data: str | Path) -> Path:
    """The local file of a task."""
    path = Path(data) / f"{name}.jsonl"
    if not look.is_file(path):
        raise UserError(f"{path}: missing; create the folder with scripts/fetch_eval_data.py {data}")
    return path


def hub_set(name: str) -> str:
    """ "hub"; raises a `UserError` if here is a folder with the name of the task's set, which `datasets` would take first."""
    named = _manager(name).task_index[name].cfg["dataset_path"]
    if look.is_there(named):
        raise UserError(f"{named} is also a folder here: go to another one to score the Hub's {named}, or give --data")
    return "hub"


def variant_of(name: str, data: str | Path | None) -> str:
    """The text variant of a task; "" if it is lm-eval's own.

    lm-eval's LAMBADA keeps the line breaks of its books; a set without any is another text, with other scores.
    """
    if name != "lambada_openai" or data is None:
        return ""
    return "" if "\\n" in data_file(name, data).read_text() else "text without line breaks"


def _manager(name: str) -> TaskManager:
    """lm-eval's, of the task's folder only: reading its thousands of task files takes ten seconds."""
    return TaskManager(include_path=str(files("lm_eval.tasks").joinpath(_TASKS[name][2])), include_defaults=False)


def load(name: str, data: str | Path | None) -> TaskDict:
    """A task with its documents, zero-shot, as `score` takes it.

    Prompts, answers and metrics are lm-eval's own. data: folder of `<task>.jsonl` files; None is the Hub.

    Raises:
        UserError: a missing or unreachable set, or a local set that is not the task's.
    """
    settings: dict[str, Any] = {"task": name, "num_fewshot": 0}
    if name == "lambada_openai":
        # Without perplexity: bootstrapping its error takes longer than scoring.
        settings["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    if data is not None:
        file = data_file(name, data)

        def read(**_: Any) -> dict[str, Dataset]:  # `load_dataset` asks the Hub, and stores a copy
            return {"test": Dataset.from_list([json.loads(line) for line in file.read_bytes().splitlines()])}

        settings |= {"custom_dataset": read, "test_split": "test", "training_split": None, "validation_split": None}
    try:
        # lm-eval changes a task's settings only for the members of a group
        task = _manager(name).load({"group": f"{name} zero-shot", "task": [settings]})["tasks"][name]
    except Exception as error:  # of the Hub, of `datasets`, or of lm-eval's templates on the first item
        reason = f"{type(error).__name__}: {' '.join(str(error.__cause__ or error).split())[:200]}"
        message = f"task {name} cannot be loaded from the Hub ({reason}); fetch the sets and pass --data"
        if data is not None:
            message = f"{file}: not JSON lines of {name} ({reason})"
        raise UserError(message) from None
    task.set_fewshot_seed(seed=0)
    return {"tasks": {name: task}, "groups": {}, "group_map": {}}


def score(lm: LM, task: TaskDict, limit: int | None) -> dict[str, Any]:
    """Version, items, items_in_set, its metrics with standard errors (None for one item), and a 1 or 0 for each item in
    order, by which two models are compared.

    limit: only the first items; None is all.
    """
    evaluated = lm_eval.evaluate(lm, task, limit=limit, log_samples=True)
    (name,) = task["tasks"]
    items, results = evaluated["n-samples"][name], evaluated["results"][name]
    scores = {"version": evaluated["versions"][name], "items": items["effective"], "items_in_set": items["original"]}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in results:
            error = results[f"{metric}_stderr,none"]
            scores[metric] = float(results[f"{metric},none"])
            scores[f"{metric}_stderr"] = error if isinstance(error, float) else None
            samples = sorted(evaluated["samples"][name], key=lambda sample: sample["doc_id"])
            scores[f"{metric}_of_items"] = "".join(str(int(sample[metric])) for sample in samples)
    return scores
