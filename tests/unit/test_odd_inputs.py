"""Odd and damaged inputs of every command but the config: sweeps, data, tokenizers, checkpoints, exports, command lines.

Each is read as it should not be, or refused by a `UserError` of one or two lines that names the file; nothing else is
raised, and nothing is left behind.
"""

import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from helpers import small_runs, tiny
from helpers.made_runs import make_data, make_evaluation_data, make_run
from helpers.odd_inputs import changed_files, changed_values, in_time
from pc import PCConfig
from pc.data import Manifest, build_dataloader
from pc.data.shards import verify
from pc.data.tokenizers import load_tokenizer
from pc.errors import UserError
from pc.evaluate import hugging_face, plain_weights
from pc.sweep.spec import load as load_sweep


def complaint(read: Callable[[], Any], about: Path | str) -> str:
    """What a command says of its input; "" if it takes it. What it should not say begins with "!"."""
    try:
        with in_time():
            read()
    except UserError as error:
        said = str(error)
        if "still not done" in said:  # taken for a fault of the input
            return f"! {said}"
        fine = said.count("\n") <= 1 and str(about) in said
        return said if fine else f"! names nothing, or in many lines: {said[:300]}"
    except RecursionError:
        return "! RecursionError"
    except Exception as error:
        return f"! {type(error).__name__}: {str(error)[:300]}"
    return ""


class Findings:
    """Counts inputs, and keeps what was wrong with the answers to them."""

    def __init__(self) -> None:
        self.asked = self.refused = 0
        self.wrong: list[str] = []

    def add(self, what: str, said: str) -> None:
        self.asked += 1
        self.refused += bool(said)
        if said.startswith("!"):
            self.wrong.append(f"{what} -> {said}")

    def require(self, at_least: int) -> None:
        print(f"{self.asked} inputs, {self.refused} refused")
        assert not self.wrong, f"{len(self.wrong)} of {self.asked}:\n" + "\n".join(self.wrong[:40])
        assert self.refused >= at_least


def some(cases: Iterator, soak: bool, count: int) -> list:
    """All of them in the long test, else so many drawn at random."""
    cases = list(cases)
    return cases if soak else random.Random(0).sample(cases, min(count, len(cases)))


SOAK = pytest.mark.parametrize("soak", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all"])

SWEEP = {
    "description": "x", "configs": ["tiny.toml"], "seeds": [0, 1], "folder": "out",
    "axes": {"optimizer.lr": {"first": 1e-3, "last": 2e-3, "factor": 2}, "pc.level": [1, "polar_express"], "pc.blocks": [["o"], ["ffn"]]},
    "select": {"metric": "loss", "spike_window": 50, "spike_deviations": 6.0, "spike_margin": 0.1, "spike_warmup": 10, "spikes_allowed": 0},
}  # fmt: skip


@SOAK
def test_sweeps(tmp_path, monkeypatch, soak):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text("[training]\nsteps = 5\n")
    file, findings = Path("sweep.toml"), Findings()
    for what, document in some(changed_values(SWEEP), soak, 60):
        try:
            file.write_text(tomli_w.dumps(document))
        except (TypeError, ValueError):
            continue  # TOML has no null
        findings.add(what, complaint(lambda: load_sweep(file), file))
    file.write_text(tomli_w.dumps(SWEEP))
    assert len(load_sweep(file).runs) == 16
    for what, damaged in changed_files(tmp_path):
        findings.add(what, complaint(lambda: load_sweep(file), damaged.name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.toml", "tiny.toml"]
    findings.require(20)


@SOAK
def test_data_folders(tiny_shards, tmp_path, soak):
    folder = shutil.copytree(tiny_shards, tmp_path / "data")

    def read():
        manifest = Manifest.read(folder)
        verify(manifest)
        manifest.load_tokenizer()
        loader = build_dataloader(
            folder, "train", seed=0, seq_len=16, local_batch_size=2, dp_rank=0, dp_world_size=1,
            vocab_size=manifest.vocab_size,
        )  # fmt: skip
        next(iter(loader))

    assert complaint(read, folder) == ""
    file, findings = folder / "manifest.json", Findings()
    whole = file.read_text()
    for what, document in some(changed_values(json.loads(whole)), soak, 60):
        file.write_text(json.dumps(document))
        findings.add(what, complaint(read, folder))
    file.write_text(whole)
    for what, _ in changed_files(folder):
        findings.add(what, complaint(read, folder))
    assert complaint(read, folder) == ""
    findings.require(50)


@SOAK
def test_tokenizers(tmp_path, soak):
    findings = Findings()
    for reference in (
        "",
        " ",
        "no-such",
        "no/such",
        "x.model",
        "\0",
        "a\nb",
        "~no-such-user/x",
        "/",
        "n" * 5000,
        "owner/name",
    ):
        findings.add(repr(reference), complaint(lambda reference=reference: load_tokenizer(reference), ""))
    folder = tmp_path / "tokenizer"
    tokenizer_json = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []},
    }  # fmt: skip
    config = {"eos_token": "</s>", "bos_token": {"content": "a"}}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).encode("a") == [0]
    for name, document in (("tokenizer.json", tokenizer_json), ("tokenizer_config.json", config)):
        for what, changed in some(changed_values(document), soak, 30):
            (folder / name).write_text(json.dumps(changed))
            findings.add(f"{name}: {what}", complaint(lambda: load_tokenizer(folder), folder))
        (folder / name).write_text(json.dumps(document))
    for what, _ in changed_files(folder):
        findings.add(what, complaint(lambda: load_tokenizer(folder).encode("a"), folder))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.model").write_bytes(load_tokenizer("mistral-common").files["tokenizer.model"])
    for what, _ in changed_files(model):
        findings.add(what, complaint(lambda: load_tokenizer(model).encode("a"), model))
    findings.require(40)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    data = make_data(folder / "data")
    tiny.add_tiny_flavor()
    run = make_run(folder / "run", data, PCConfig(level=4, schedule="step"), flavor="tiny")
    return run, hugging_face.export(run.checkpoint, folder / "export")


@SOAK
def test_checkpoints(made, tmp_path, soak):
    run = shutil.copytree(made[0].checkpoint.parent.parent, tmp_path / "run")
    step = run / "checkpoint" / "step-7"
    findings, file = Findings(), run / "config.toml"
    config = tomllib.loads(file.read_text())
    for what, document in some(changed_values(config), soak, 10):
        try:
            file.write_text(tomli_w.dumps(document))
        except (TypeError, ValueError):
            continue
        findings.add(f"config.toml: {what}", complaint(lambda: hugging_face.load(step), ""))
    file.write_text(tomli_w.dumps(config))
    for what, _ in changed_files(run):
        findings.add(what, complaint(lambda: plain_weights.load(step), run))
    for path in (run, run / "checkpoint", tmp_path, tmp_path / "no-such", file, Path("")):
        findings.add(str(path)[:40], complaint(lambda path=path: hugging_face.load(path), ""))
    out = tmp_path / "out"
    for arguments in ({"tokenizer": "no/such"}, {"tokenizer": str(run)}):
        findings.add(
            str(arguments), complaint(lambda arguments=arguments: hugging_face.export(step, out, **arguments), "")
        )
    for target in (run, file):
        findings.add(f"out {target}", complaint(lambda target=target: hugging_face.export(step, target), ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    findings.require(20)


@SOAK
def test_exports(made, tmp_path, soak):
    folder = shutil.copytree(made[1], tmp_path / "export")
    findings = Findings()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        document = json.loads((folder / name).read_text())
        for what, changed in some(changed_values(document), soak, 3):
            (folder / name).write_text(json.dumps(changed))
            findings.add(f"{name}: {what}", complaint(lambda: hugging_face.load(folder), folder))
        (folder / name).write_text(json.dumps(document))
    for what, _ in changed_files(folder) if soak else ():
        findings.add(what, complaint(lambda: hugging_face.load(folder), folder))
    findings.require(3)


# {} is an export, [] a checkpoint, () a folder of scoring sets
WRONG_WORDS = {
    "score.py": (
        "", "no-such", "=", "a=no-such", "{} {}", "--limit 1", "{} --limit 0", "{} --limit -1", "{} --limit x", "{} --limit nan",
        "{} --batch-size 0 --data ()", "{} --batch-size x", "{} --tasks ,", "{} --tasks mmlu", "{} --data no-such",
        "{} --data {}", "{} --data () --output /proc/no-such", "{} --no-such", "() --data ()", "[]/.metadata --data ()",
    ),
    "generate.py": (
        "", "{}", "no-such x", "() x", "{} x --max-new-tokens 0", "{} x --max-new-tokens x", "{} x --temperature -1",
        "{} x --temperature nan", "{} x --temperature inf", "{} x --top-p 0", "{} x --top-p 2", "{} x --top-p nan",
        "{} x --seed x", "{} x --seed -1e30", "{} x y", "{} x --no-such",
    ),
    "export_hf.py": (
        "", "[]", "no-such out", "() out", "{} out", "[] {}", "[] []", "[] out --dtype int3", "[] out --tokenizer no/such",
        "[] out --no-such", "[] out more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("script, words", [(script, words) for script, rows in WRONG_WORDS.items() for words in rows])
def test_command_lines(command, made, sets, tmp_path, monkeypatch, script, words):
    monkeypatch.chdir(tmp_path)
    places = {"{}": str(made[1]), "[]": str(made[0].checkpoint), "()": str(sets)}
    for place, path in places.items():
        words = words.replace(place, path)
    status, _, err = command(script, *words.split())
    said = err[err.rindex("error: ") :]
    assert status == 2 and said.count("\n") <= 2 and "Traceback" not in err, err
    assert not list(tmp_path.iterdir())


# commands and what each would write below a file
BELOW_A_FILE = {
    "polynomials.py": "--output FILE/x",
    "theorem.py": "--steps 2 --output FILE/x",
    "cost.py": "TOML --world-size 1 --output FILE/x",
    "curves.py": "SMALL --output FILE/x",
    "spectra.py": "SMALL --output FILE/x",
    "export_hf.py": "CHECKPOINT FILE/x",
    "score.py": "CHECKPOINT --data SETS --output FILE/x",
    "train_tokenizer.py": "--input TEXT --vocab-size 300 --output FILE/x",
    "tokenize_fineweb.py": "--input TEXT --tokenizer mistral-common --output FILE/x",
    "sweep.py": "run SWEEP",
    "slurm/submit.py": "TOML --gpus-per-node 1 --job.dump_folder FILE/x",
    "pc.launch.local": "TOML --job.dump_folder FILE/x",
}


@pytest.mark.parametrize("script", BELOW_A_FILE)
def test_a_file_where_a_folder_should_be(command, made, sets, tiny_shards, tmp_path, monkeypatch, script):
    places = {name: tmp_path / name.lower() for name in ("FILE", "SWEEP", "SMALL", "TOML")}
    places |= {"CHECKPOINT": made[0].checkpoint, "SETS": sets, "TEXT": tiny_shards.parent / "text.parquet"}
    places["FILE"].write_text("")
    tiny.write_config(places["TOML"], tiny_shards, tmp_path)
    tiny.add_tiny_flavor()
    sweep = {"description": "x", "configs": [str(places["TOML"])], "seeds": [0], "folder": str(places["FILE"] / "x")}
    places["SWEEP"].write_text(tomli_w.dumps(sweep | {"axes": {"pc.enable": [True]}}))
    small_runs.save_checkpoint(places["SMALL"], "step")
    small_runs.write_metrics(places["SMALL"])
    words = BELOW_A_FILE[script]
    for name, path in places.items():
        words = words.replace(name, str(path))
    status, _, err = command(script, *words.split())
    said = err[err.rindex("error: ") :]
    assert status == 2 and str(places["FILE"]) in said and said.count("\n") <= 2, err


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    return make_evaluation_data(tmp_path_factory.mktemp("sets") / "sets")
