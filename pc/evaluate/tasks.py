"""The nine zero-shot tasks of the paper, as lm-eval defines them, from the Hub or from local JSON lines."""

import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from pc.common.files import write_atomically
from pc.errors import UserError

# Each task's name in tables, metric, and lm-eval's own definition inside its package. Metrics are those of the paper's
# table of downstream evaluation: accuracy, normalised by length where the paper does so.
_TASKS = {
    "lambada_openai": ("LAMBADA", "acc", "lambada/lambada_openai.yaml"),
    "hellaswag": ("HellaSwag", "acc_norm", "hellaswag/hellaswag.yaml"),
    "winogrande": ("WinoGrande", "acc", "winogrande/default.yaml"),
    "piqa": ("PIQA", "acc", "piqa/piqa.yaml"),
    "boolq": ("BoolQ", "acc", "super_glue/boolq/default.yaml"),
    "arc_easy": ("ARC-E", "acc_norm", "arc/arc_easy.yaml"),
    "arc_challenge": ("ARC-C", "acc_norm", "arc/arc_challenge.yaml"),
    "commonsense_qa": ("CSQA", "acc", "commonsense_qa/default.yaml"),
    "openbookqa": ("OBQA", "acc_norm", "openbookqa/openbookqa.yaml"),
}
SHORT_NAMES = {task: name for task, (name, _, _) in _TASKS.items()}
METRICS = {task: metric for task, (_, metric, _) in _TASKS.items()}


def require_known(names: list[str]) -> None:
    if not names or set(names) - METRICS.keys():
        raise UserError(f"{', '.join(names) or 'no task'}: tasks are {', '.join(METRICS)}")


def data_file(name: str, data: str | Path) -> Path:
    """The local file of a task."""
    path = Path(data) / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: missing; create the folder with scripts/fetch_eval_data.py {data}")
    return path


def variant_of(name: str, data: str | Path | None) -> str:
    """The text variant of a task; "" if it is lm-eval's own.

    lm-eval's LAMBADA keeps the line breaks of its books; a set without any is another text, with other scores.
    """
    if name != "lambada_openai" or data is None:
        return ""
    return "" if "\\n" in data_file(name, data).read_text() else "text without line breaks"


def write_task_files(out: str | Path, names: list[str], data: str | Path | None) -> None:
    """Write `<task>.yaml` files into `out`, for lm-eval's `--include_path`.

    Each includes lm-eval's own file, so prompts, answers and metrics stay lm-eval's; only the source of documents
    changes: the folder `data` of `<task>.jsonl` files, or the Hub if it is None.
    """
    for name in names:
        source = files("lm_eval.tasks").joinpath(_TASKS[name][2])
        settings = {"include": str(source), "task": name, "num_fewshot": 0}
        if name == "lambada_openai":
            # Without perplexity: bootstrapping its error takes longer than scoring.
            settings["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
        if data is not None:
            settings |= {
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {"test": str(data_file(name, data).resolve())}},
                "training_split": None,
                "validation_split": None,
                "test_split": "test",
            }
        write_atomically(Path(out) / f"{name}.yaml", yaml.safe_dump(settings, sort_keys=False))


def load(names: list[str], data: str | Path | None) -> TaskDict:
    """Tasks with their documents, zero-shot, as `score` takes them.

    Raises:
        UserError: an unknown task, a missing or unreachable set, or a local set that is not the task's.
    """
    require_known(names)
    with tempfile.TemporaryDirectory() as folder:
        write_task_files(folder, names, data)
        # Without the defaults in the index: reading lm-eval's thousands of task files takes ten seconds.
        manager = TaskManager(include_path=folder, include_defaults=False)
        tasks = {name: _load_one(name, data, manager) for name in names}
    return {"tasks": tasks, "groups": {}, "group_map": {}}


def _load_one(name: str, data: str | Path | None, manager: TaskManager) -> ConfigurableTask:
    try:
        task = manager.load(name)["tasks"][name]
    except Exception as error:  # of the Hub, of `datasets`, or of lm-eval's templates on the first item
        reason = f"{type(error).__name__}: {' '.join(str(error.__cause__ or error).split())[:200]}"
        said = f"task {name} cannot be loaded from the Hub ({reason}); fetch the sets and pass --data"
        if data is not None:
            said = f"{data_file(name, data)}: not JSON lines of {name} ({reason})"
        raise UserError(said) from None
    task.set_fewshot_seed(seed=0)
    return task


def score(lm: LM, tasks: TaskDict, limit: int | None) -> dict[str, dict[str, Any]]:
    """For each task: version, items, items_in_set, and its metrics with standard errors (None for one item).

    limit: only the first items of each task; None is all.
    """
    found = lm_eval.evaluate(lm, tasks, limit=limit, log_samples=False)
    scores = {}
    for name in tasks["tasks"]:
        items, results = found["n-samples"][name], found["results"][name]
        scores[name] = {
            "version": found["versions"][name],
            "items": items["effective"],
            "items_in_set": items["original"],
        }
        for metric in ("acc", "acc_norm"):
            if f"{metric},none" in results:
                error = results[f"{metric}_stderr,none"]
                scores[name][metric] = float(results[f"{metric},none"])
                scores[name][f"{metric}_stderr"] = error if isinstance(error, float) else None
    return scores
