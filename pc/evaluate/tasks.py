"""The nine zero-shot tasks of the paper, as lm-eval defines them, from the Hub or from local JSON lines."""

import json
import tempfile
from importlib.resources import files
from itertools import islice
from pathlib import Path

import yaml
from datasets.exceptions import DatasetGenerationError
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
    for name in names:
        if name not in METRICS:
            raise UserError(f"unknown task {name!r}; tasks are {', '.join(METRICS)}")
    if not names:
        raise UserError(f"no task given; tasks are {', '.join(METRICS)}")


def data_file(name: str, data: str | Path) -> Path:
    """The local file of a task."""
    path = Path(data) / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: missing; create the folder with scripts/fetch_eval_data.py {data}")
    return path


def _require_json_lines(path: Path) -> None:
    """Check a file before pyarrow reads it, whose parser kills the process on some files."""
    number = 0
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not isinstance(json.loads(line), dict):
                raise ValueError("not an object")
        if not number:
            raise ValueError("empty")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON lines (line {number}: {error})") from None


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


def load(names: list[str], data: str | Path | None, limit: int | None = None) -> TaskDict:
    """Tasks with their documents, zero-shot, as `lm_eval.evaluate` takes them.

    Raises:
        UserError: an unknown task, a missing or unreachable set, or a local set with a faulty item among its first
            `limit` (None: all).
    """
    require_known(names)
    with tempfile.TemporaryDirectory() as folder:
        write_task_files(folder, names, data)
        # Without the defaults in the index: reading lm-eval's thousands of task files takes ten seconds.
        manager = TaskManager(include_path=folder, include_defaults=False)
        tasks = {name: _load_one(name, data, limit, manager) for name in names}
    return {"tasks": tasks, "groups": {}, "group_map": {}}


def _load_one(name: str, data: str | Path | None, limit: int | None, manager: TaskManager) -> ConfigurableTask:
    if data is not None:
        _require_json_lines(data_file(name, data))
    try:
        task = manager.load(name)["tasks"][name]
    except DatasetGenerationError as error:
        raise UserError(f"{data_file(name, data)}: not JSON lines ({error.__cause__ or error})") from None
    except OSError as error:  # requests' and the Hub's errors are OSErrors
        if data is not None:
            raise
        reason = str(error).splitlines()[0]
        raise UserError(
            f"task {name} cannot be loaded from the Hub ({reason}); fetch the sets and pass --data"
        ) from None
    except Exception as error:  # raised by lm-eval's templates and functions on the first items
        if data is None:
            raise
        raise UserError(f"{data_file(name, data)}: does not have the columns of {name} ({_reason(error)})") from None
    if data is not None:
        for number, item in enumerate(islice(task.eval_docs, limit), 1):
            _require_item(task, item, f"{data_file(name, data)}: item {number} is not an item of {name}")
    task.set_fewshot_seed(seed=0)
    return task


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _require_item(task: ConfigurableTask, item: dict, complaint: str) -> None:
    """lm-eval counts an answer outside the choices as wrong and only warns, and fails on other faults with a
    traceback."""
    try:
        context, target = task.doc_to_text(item), task.doc_to_target(item)
        choices = task.doc_to_choice(item) if task.OUTPUT_TYPE == "multiple_choice" else None
    except Exception as error:
        raise UserError(f"{complaint} ({_reason(error)})") from None
    if task.multiple_input:  # WinoGrande: the choices are contexts, `context` is the number of the right one
        context, target = target, context
    texts = [context, target] if choices is None else [context, *choices]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{complaint} (text is missing)")
    if choices is not None and (
        target not in choices if isinstance(target, str) else target not in range(len(choices))
    ):
        raise UserError(f"{complaint} (the answer {target!r} is not among its {len(choices)} choices)")
