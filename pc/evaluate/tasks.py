"""The nine zero-shot tasks of the paper, as lm-eval defines them, from the Hub or from local JSON lines."""

import tempfile
from importlib.resources import files
from pathlib import Path

import jinja2
import yaml
from datasets.exceptions import DatasetGenerationError
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from pc.common.files import write_atomically
from pc.errors import UserError

# Paper, table on downstream evaluation: accuracy normalised by length where the paper reports it.
METRICS = {
    "lambada_openai": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "piqa": "acc",
    "boolq": "acc",
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "commonsense_qa": "acc",
    "openbookqa": "acc_norm",
}

# lm-eval's own definitions, inside its package.
_TASK_FILES = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
}


def require_known(names: list[str]) -> None:
    for name in names:
        if name not in METRICS:
            raise UserError(f"unknown task {name!r}; tasks are {', '.join(METRICS)}")
    if not names:
        raise UserError(f"no task named; tasks are {', '.join(METRICS)}")


def data_file(name: str, data: str | Path) -> Path:
    """The local file of a task."""
    path = Path(data) / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: missing; make the folder with scripts/fetch_eval_data.py {data}")
    return path


def variant_of(name: str, data: str | Path | None) -> str:
    """What the text of a task is where it is not lm-eval's own; "" where it is.

    lm-eval's LAMBADA keeps the line breaks of its books; sets without any are another text, with other scores.
    """
    if name != "lambada_openai" or data is None:
        return ""
    return "" if "\\n" in data_file(name, data).read_text() else "text without line breaks"


def write_task_files(out: str | Path, names: list[str], data: str | Path | None) -> None:
    """Write `<task>.yaml` files into `out`, for lm-eval's `--include_path`.

    Each includes lm-eval's own file, so prompts, answers and metrics stay lm-eval's; only where documents
    come from changes.

    Args:
        out: folder.
        names: of `METRICS`.
        data: folder of `<task>.jsonl` files; None leaves the Hub.
    """
    for name in names:
        source = files("lm_eval.tasks").joinpath(_TASK_FILES[name])
        settings = {"include": str(source), "task": name, "num_fewshot": 0}
        if name == "lambada_openai":
            # Perplexity is left out: bootstrapping its error takes longer than the scoring.
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
    """Tasks with their documents, zero-shot, as `lm_eval.evaluate` takes them."""
    require_known(names)
    with tempfile.TemporaryDirectory() as folder:
        write_task_files(folder, names, data)
        # The defaults are left out of the index: reading lm-eval's thousands of task files takes ten seconds.
        manager = TaskManager(include_path=folder, include_defaults=False)
        tasks = {name: _load_one(name, data, manager) for name in names}
    return {"tasks": tasks, "groups": {}, "group_map": {}}


def _load_one(name: str, data: str | Path | None, manager: TaskManager):
    try:
        task = manager.load(name)["tasks"][name]
    except DatasetGenerationError as error:
        raise UserError(f"{data_file(name, data)}: not JSON lines ({error.__cause__ or error})") from None
    except OSError as error:  # requests' and the Hub's errors are OSErrors
        if data is not None:
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"task {name} cannot be had from the Hub ({reason}); fetch the sets and pass --data") from None
    except (KeyError, TypeError, ValueError, jinja2.UndefinedError) as error:
        if data is None:
            raise
        raise UserError(f"{data_file(name, data)}: not the columns that {name} needs ({error!r})") from None
    task.set_fewshot_seed(seed=0)
    return task
