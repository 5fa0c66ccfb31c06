"""The commands as a user types them, and lm-eval's own command on their output."""

import json
import os
import stat
from pathlib import Path

import pytest

from helpers.made_runs import make_data, make_evaluation_data, make_run
from pc import PCConfig
from pc.evaluate import tasks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with PC; (its checkpoint, a folder with sets, a free folder)."""
    folder = tmp_path_factory.mktemp("commands")
    run = make_run(folder / "run", make_data(folder / "shards"), PCConfig(level=4, schedule="step"))
    return run.checkpoint, make_evaluation_data(folder / "sets"), folder


def test_export_then_lm_evals_command_agrees_with_ours(made, command, monkeypatch):
    checkpoint, sets, folder = made
    before = os.umask(0o027)
    status, printed, errors = command("export_hf.py", checkpoint, folder / "out")
    os.umask(before)
    assert status == 0, errors
    modes = {stat.filemode(p.stat().st_mode) for p in [folder / "out", *(folder / "out").iterdir()]}
    assert modes == {"drwxr-x---", "-rw-r-----"}  # as the umask says
    assert printed.strip() == str(folder / "out")

    settings = ["--data", sets, "--output", folder / "scores", "--tasks", "piqa,arc_easy"]
    status, _, errors = command("score.py", f"mine={checkpoint}", *settings)
    assert status == 0, errors
    ours = json.loads((folder / "scores" / "mine.json").read_text())["tasks"]

    tasks.write_task_files(folder / "task_files", ["piqa", "arc_easy"], sets)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, errors = command(
        "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={folder / 'out'}",
        "--tasks", "piqa,arc_easy",
        "--include_path", folder / "task_files", "--device", "cpu", "--batch_size", "4",
        "--output_path", folder / "lm_eval",
    )  # fmt: skip
    assert status == 0, errors
    theirs = json.loads(next((folder / "lm_eval").rglob("results_*.json")).read_text())["results"]
    for name in ("piqa", "arc_easy"):
        for metric in ("acc", "acc_norm"):
            assert theirs[name][f"{metric},none"] == ours[name][metric]


def test_generate_is_repeatable(made, command):
    checkpoint, _, _ = made
    words = ("generate.py", checkpoint, "The river", "--max-new-tokens", 8)
    texts = [command(*words, "--temperature", temperature)[1] for temperature in (0.8, 0.8, 0)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("The river") and len(texts[0]) > len("The river\n")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("export_hf.py", ["nowhere", "out"], "error: nowhere: no such checkpoint"),
        ("score.py", ["nowhere"], "error: nowhere: no such model"),
        (
            "dry_run.py",
            ["train_configs/debug.toml", "--no-data", "--evaluation.tasks", "mmlu"],
            "evaluation.tasks = ['mmlu']",
        ),
        ("generate.py", ["tests", "Hello"], "error: tests: not a checkpoint"),
        ("generate.py", ["tests", "Hello", "--temperature", "-1"], "error: temperature should be at least 0"),
    ],
)
def test_mistakes_get_one_line(command, monkeypatch, script, arguments, message):
    monkeypatch.chdir(Path(__file__).parents[2])
    status, _, errors = command(script, *arguments)
    assert status == 2
    assert message in errors and len(errors.strip().splitlines()) == 1
