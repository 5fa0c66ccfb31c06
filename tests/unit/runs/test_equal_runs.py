"""Equal runs are recognised by what affects their result, trained once, and reused."""

import errno
import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers.made_runs import write_run
from pc.errors import UserError
from pc_recipe.config import Config, load_config, write_config
from pc_recipe.config.run_key import as_begun, differing_keys, list_unapplied
from pc_recipe.data.manifest import Manifest
from pc_recipe.files import run_folder
from pc_recipe.files.errors import ReadFailed
from pc_recipe.files.lock import is_locked, lock
from pc_recipe.plan.allocation import Allocation
from pc_recipe.plan.check import CheckResult, check
from pc_recipe.runs.sweep import budget, equal_runs
from pc_recipe.runs.sweep.local import train_all
from pc_recipe.runs.sweep.points import read_results
from pc_recipe.runs.sweep.results import describe_status
from pc_recipe.runs.sweep.spec import load
from pc_recipe.runs.sweep.submit import submit
from pc_recipe.train import environment
from pc_recipe.train.inputs import code_version, result_key

CONFIG = """
[training]
seq_len = 32
local_batch_size = 2
global_batch_size = 4
steps = 5
[optimizer]
lr = 1e-3
[data]
path = "no demo data"
[pc]
enable = true
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pc.toml").write_text(CONFIG)
    (tmp_path / "level.toml").write_text('configs = ["pc.toml"]\n[axes]\n"pc.level" = [3, 4]\n')
    (tmp_path / "blocks.toml").write_text('configs = ["pc.toml"]\n[axes]\n"pc.blocks" = [["ffn", "o"], ["ffn"]]\n')
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """Replaces training: the names of the runs that would train, whose folders then look as the trainer leaves them."""
    names = []

    def train(run, held, processes, label):
        with held:
            names.append(str(run.folder))
            finish(run.config, run.overrides, run.folder)

    monkeypatch.setattr("pc_recipe.runs.sweep.local.train_one", train)
    monkeypatch.setattr("pc_recipe.runs.sweep.start.check", lambda *_, **__: CheckResult(Config()))  # there are no data
    return names


def finish(config, overrides, folder: Path, state="finished"):
    write_config(load_config(config, overrides), folder / "config.toml")
    (folder / "environment.json").write_text(json.dumps({"code": code_version()}))
    write_run(folder, [{"step": 5, "tokens": 640, "loss": 3.0, "validation_loss": 3.0}], state)


def key_of(*words: str):
    return result_key(load_config("pc.toml", words), world_size=1)


@pytest.mark.parametrize(
    "words",
    [
        ["--job.dump_folder=elsewhere", "--job.description=other", "--metrics.log_freq=7", "--diagnostics.freq=0"],
        ["--checkpoint.interval=3", "--compile.enable", "--profiling.enable_profiling"],
        ["--pc.blocks=up,gate,down,o"],
        ["--pc.level=3.625,-9.261,14.097,-10.351,2.89"],
        ["--training.local_batch_size=4", "--parallelism.tensor_parallel_degree=2"],
        ["--checkpoint.initial_load_path=here"],  # of a section that is off
        # a default that is written out: a key that a later version adds must not change old runs
        ["--model.init_std=0.02", "--pc.compute_dtype=float32", "--optimizer.beta1=0.9", "--debug.seed=0"],
    ],
)
def test_the_same_run(folder, words):
    assert key_of(*words) == key_of()


@pytest.mark.parametrize(
    "word",
    ["--pc.level=3", "--optimizer.lr=2e-3", "--data.seed=1", "--data.path=other", "--pc.enable=false", "--pc.blocks=o"]
    + ["--training.steps=6", "--validation.enable", "--optimizer.name=Muon"],
)
def test_another_run(folder, word):
    assert key_of(word) != key_of()


def test_settings_that_a_resume_cannot_apply_are_listed(folder):
    words = ["--debug.seed=7", "--model.init_std=0.5", "--model.init_factors={o = 2.0}", "--optimizer.lr=1e-4"]
    config = load_config("pc.toml", [*words, "--checkpoint.initial_load_path=hf"])
    began = {"debug": {"seed": 7}, "model": {"init_std": 0.02}}
    assert list_unapplied(config, began) == [
        "checkpoint.initial_load_path = 'hf'", "model.init_std = 0.5", "model.init_factors = {'o': 2.0}"
    ]  # fmt: skip
    assert list_unapplied(config, config.model_dump(exclude_unset=True)) == []
    begun = as_begun(config, began)
    assert list_unapplied(begun, began) == [] and begun.optimizer == config.optimizer
    assert begun.model_dump(exclude_unset=True).get("checkpoint", {}) == {}  # the card of an export shows it


def test_other_content_of_the_data_is_another_run(folder):
    """The content is recorded with the run. For runs of older versions and for missing data it is unknown."""
    finish("pc.toml", ["--data.path=shards"], folder / "outputs" / "by-hand")
    config, before = load_config("pc.toml", ["--data.path=shards"]), equal_runs.read_result_key(Path("outputs/by-hand"))
    assert not differing_keys(before, result_key(config))
    Path("shards").mkdir()
    for content, expected in (("a", []), ("b", ["content of data.path", "content of data.validation_path"])):
        Path("shards/manifest.json").write_text(json.dumps({"content_sha256": content}))
        if content == "a":
            environment.write_environment(Path("outputs/by-hand"), config, 1, step=0)
        assert differing_keys(equal_runs.read_result_key(Path("outputs/by-hand")), result_key(config)) == expected
        moved, weighted = (load_config("pc.toml", [f"--data.path={p}"]) for p in ("./shards", '{"shards" = 2.0}'))
        assert differing_keys(result_key(moved), result_key(config)) == []
        assert differing_keys(result_key(weighted), result_key(config)) == ["data.path"]


def test_other_content_of_what_a_run_starts_from_is_another_run(folder):
    """As if a base model were trained again into the same folder."""
    words = ["--checkpoint.enable", "--checkpoint.initial_load_path=base"]
    before = result_key(load_config("pc.toml", words))
    Path("base").mkdir()
    sums = []
    for content in "ab":
        Path("base/XXH128SUMS").write_text(content)
        sums.append(result_key(load_config("pc.toml", words)))
    assert differing_keys(*sums) == ["content of checkpoint.initial_load_path"]
    assert not differing_keys(before, sums[0])  # unknown content counts as equal


def test_a_start_of_unknown_content_is_not_equal(folder):
    """As with a folder of weights from elsewhere, which has no checksums: the weights may have changed."""
    (folder / "pc.toml").write_text(CONFIG + '[checkpoint]\nenable = true\ninitial_load_path = "given"\n')
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    assert equal_runs.group_runs([load("level.toml")])[0].state == "waiting"
    (folder / "given").mkdir()
    (folder / "given" / "XXH128SUMS").write_text("a")
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "again")
    assert equal_runs.group_runs([load("level.toml")])[0].state == "finished"


def test_unknown_batch_sizes_are_not_equal(folder):
    (folder / "pc.toml").write_text(CONFIG.replace("global_batch_size = 4\n", ""))
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    assert equal_runs.group_runs([load("level.toml")])[0].state == "waiting"


def test_a_link_to_a_run_on_a_disk_that_is_gone_stays(folder):
    """Until an equal run has finished elsewhere."""
    link = folder / "outputs/sweeps/level/level-3"
    link.parent.mkdir(parents=True)
    link.symlink_to(folder / "gone")
    equal_runs.take_over([load("level.toml")], 1)
    assert link.is_symlink()
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    equal_runs.take_over([load("level.toml")], 1)
    assert link.resolve() == folder / "outputs" / "by-hand"


@pytest.mark.parametrize("linked", ["outputs", "outputs/sweeps"])
def test_a_run_of_another_sweep_is_found_where_a_folder_is_a_link_to_another_disk(folder, linked):
    (folder / "disk").mkdir()
    Path(linked).parent.mkdir(exist_ok=True)
    Path(linked).symlink_to(folder / "disk")
    finish("pc.toml", [], Path("outputs/sweeps/blocks/blocks-ffn+o"))
    assert [group.state for group in equal_runs.group_runs([load("level.toml")], 1)] == ["waiting", "finished"]


@pytest.mark.parametrize("text", ["[1]", "[" * 10_000, "\xff"], ids=range(3))
def test_the_content_of_damaged_data_is_unknown(folder, text):
    """A plan continues; the run that opens the data will report the damage."""
    Path("shards").mkdir()
    Path("shards/manifest.json").write_text(text, encoding="latin-1")
    assert result_key(load_config("pc.toml", ["--data.path=shards"])) == key_of("--data.path=shards")


def test_a_seed_is_trained_in_all_arms_before_the_next(folder, trained):
    for name, level in (("one", 3), ("two", 4)):
        (folder / f"{name}.toml").write_text(f'configs = ["pc.toml"]\nseeds = [1, 2]\n[axes]\n"pc.level" = [{level}]\n')
    train_all([load("one.toml"), load("two.toml")])
    assert [Path(name).parts[2::2] for name in trained] == [
        ("one", "seed-1"), ("two", "seed-1"), ("one", "seed-2"), ("two", "seed-2")
    ]  # fmt: skip


def test_a_run_that_continues_on_another_processor_records_both(folder, monkeypatch):
    config = load_config("pc.toml")
    Path("run").mkdir()
    for vendor in ("AuthenticAMD", "GenuineIntel", "GenuineIntel"):
        monkeypatch.setattr(environment, "read_processor", lambda: {"vendor_id": vendor})
        environment.write_environment(Path("run"), config, 1, step=1 if Path("run/environment.json").exists() else 0)
    assert [part["processor"]["vendor_id"] for part in run_folder.read_parts(Path("run"))] == [
        "GenuineIntel",
        "AuthenticAMD",
    ]


def test_equal_runs_of_two_sweeps_and_of_a_config_are_trained_once(folder, trained, capsys):
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    with open(folder / "outputs" / "by-hand" / "config.toml", "a") as config:
        config.write("[of_the_past]\nkey = 1\n")  # written by another version
    sweeps = [load("level.toml"), load("blocks.toml")]
    text = budget.table(sweeps, 400.0, 1)
    assert "level/level-3 " in text and "finished as outputs/by-hand" in text
    assert "equal to outputs/sweeps/level/level-4" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["4", "3", "2"]
    equal_runs.take_over(sweeps)
    train_all(sweeps)
    assert trained == ["outputs/sweeps/level/level-4", "outputs/sweeps/blocks/blocks-ffn"]
    said = capsys.readouterr().out
    assert "level-3: reused from outputs/by-hand" in said
    assert "blocks-ffn+o: reused from outputs/sweeps/level/level-4" in said
    assert "reused from ../level/level-4" in describe_status(sweeps[1])
    results = [json.loads(line) for line in Path("outputs/sweeps/blocks/results.jsonl").read_text().splitlines()]
    assert [result["validation_loss"] for result in results] == [3.0, 3.0]
    train_all(sweeps)
    assert len(trained) == 2


def test_a_started_run_is_trained_to_its_end_though_an_equal_one_has_finished(folder, trained, monkeypatch):
    finish("pc.toml", [], folder / "outputs/sweeps/blocks/blocks-ffn+o", state="stopped")
    finish("pc.toml", ["--pc.blocks=ffn"], folder / "outputs/sweeps/blocks/blocks-ffn")
    queued = []
    monkeypatch.setattr(
        "pc_recipe.runs.slurm.submit_job", lambda where, options, configs: queued.append(configs) or "1"
    )
    monkeypatch.setattr("pc_recipe.runs.sweep.start.check", lambda *_, **__: CheckResult(Config()))
    both = [load("level.toml"), load("blocks.toml")]
    for state in ("stopped", "finished"):
        finish("pc.toml", [], folder / "outputs/by-hand", state=state)
        submit(both, 0, Allocation(1, 1, []))
        names = [Path(config.job.dump_folder).name for configs in queued for config in configs]
        assert names == ["level-3", "blocks-ffn+o"]
        queued.clear()
        equal_runs.take_over(both, 1)
    train_all(both)
    assert trained == ["outputs/sweeps/level/level-3", "outputs/sweeps/blocks/blocks-ffn+o"]


def test_a_sweep_goes_on_when_it_grows_and_refuses_what_was_trained_otherwise(folder, trained):
    train_all([load("level.toml")])
    (folder / "level.toml").write_text('configs = ["pc.toml"]\n[axes]\n"pc.level" = [1, 3, 4]\n')
    (folder / "pc.toml").write_text(CONFIG + "[metrics]\nlog_freq = 3\n")  # does not affect results
    equal_runs.require_unchanged(load("level.toml"))
    train_all([load("level.toml")])
    assert [Path(name).name for name in trained] == ["level-3", "level-4", "level-1"]
    (folder / "pc.toml").write_text(CONFIG.replace("1e-3", "2e-3"))
    with pytest.raises(UserError, match=r"level-1 was trained with optimizer.lr = 0.001 \(now 0.002\)"):
        equal_runs.require_unchanged(load("level.toml"))


def test_a_sweep_that_gets_seeds_keeps_what_it_has_and_others_find_what_it_adds(folder, trained):
    """Then seed-0 is a link to its own parent folder, where seed-1 is."""
    first = 'configs = ["pc.toml"]\n[axes]\n"pc.level" = [3]\n'
    (folder / "level.toml").write_text(first)
    train_all([load("level.toml")])
    (folder / "level.toml").write_text(f"seeds = [0, 1]\n{first}")
    train_all([load("level.toml")])
    results = read_results(Path("outputs/sweeps/level"))
    assert [result["name"] for result in results] == ["level-3/seed-0", "level-3/seed-1"]
    (folder / "one.toml").write_text(f"seeds = [1]\n{first}")
    equal_runs.take_over([load("one.toml")])
    train_all([load("one.toml")])
    assert trained == ["outputs/sweeps/level/level-3", "outputs/sweeps/level/level-3/seed-1"]


def test_a_run_of_changed_settings_is_not_an_equal_run(folder, trained):
    """Its config.toml describes only its last part."""
    by_hand = folder / "outputs" / "by-hand"
    finish("pc.toml", ["--pc.level=3"], by_hand)
    changed = load_config("pc.toml", ["--pc.level=3", "--optimizer.lr=2e-3"])
    now = tomllib.loads((by_hand / "config.toml").read_text())
    run_folder.keep_earlier_config(by_hand, now, 3)
    assert equal_runs.read_result_key(by_hand)  # nothing changed
    run_folder.keep_earlier_config(by_hand, changed.model_dump(exclude_unset=True), 3)
    write_config(changed, by_hand / "config.toml")
    assert (by_hand / "config.1.toml").exists() and equal_runs.read_result_key(by_hand) is None
    train_all([load("level.toml")])
    assert "outputs/sweeps/level/level-3" in trained
    in_sweep = folder / "outputs/sweeps/level/level-3"
    (by_hand / "config.1.toml").rename(in_sweep / "config.1.toml")
    write_config(load_config("pc.toml", ["--optimizer.lr=2e-3"]), in_sweep / "config.toml")
    with pytest.raises(UserError, match="level-3 was trained with several configurations"):
        equal_runs.require_unchanged(load("level.toml"))
    run_folder.keep_earlier_config(in_sweep, now, 0)  # it begins from the start again
    assert not (in_sweep / "config.1.toml").exists()


def test_a_run_that_is_trained_elsewhere_is_passed_over(folder, trained, capsys):
    finish("pc.toml", [], folder / "outputs" / "by-hand", state="running")
    with lock(folder / "outputs" / "by-hand"), lock(folder / "outputs/sweeps/level/level-3"):
        with pytest.raises(UserError, match="1 of 2 runs did not finish: level-4"):
            train_all([load("level.toml")])
    said = capsys.readouterr().out
    assert "level-3: another process is training it" in said
    assert "level-4: another process is training an equal run in outputs/by-hand" in said and trained == []


def test_equal_runs_are_queued_once(folder, monkeypatch):
    monkeypatch.setattr(
        "pc_recipe.runs.sweep.start.check", lambda *_, **__: CheckResult(Config(), warnings=["the disk is small"])
    )
    queued = []

    def sbatch(words, **_):
        listed = [load_config(file).job.dump_folder for file in sorted(Path(words[-1]).iterdir())]
        queued.append((next(word for word in words if word.startswith("--array")), [Path(run).name for run in listed]))
        return subprocess.CompletedProcess(words, 0, "77", "")

    monkeypatch.setattr(subprocess, "run", sbatch)
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    sweeps = [load("level.toml"), load("blocks.toml")]
    equal_runs.take_over(sweeps)
    said = submit(sweeps, 2, Allocation(1, 8, []))
    assert queued == [("--array=0-0%2", ["level-4"]), ("--array=0-0%2", ["blocks-ffn"])]
    assert "blocks-ffn+o: equal to outputs/sweeps/level/level-4" in said
    assert said.startswith("warning: level-4: the disk is small\n") and said.count("warning") == 1  # level-3 has ended


@pytest.mark.parametrize("action", ["run", "submit"])
def test_a_sweep_with_a_mistake_in_one_run_starts_none(folder, tiny_shards, monkeypatch, command, action):
    """A single run with it would not start either. Warnings are said once; a run that has ended is not asked again."""
    started, checked = [], []
    monkeypatch.setattr(
        "pc_recipe.runs.sweep.local.train_one", lambda run, held, *_: started.append(run) or held.close()
    )
    monkeypatch.setattr(
        "pc_recipe.runs.slurm.submit_job", lambda where, options, configs: started.extend(configs) or "1"
    )
    monkeypatch.setenv("NGPU", "1")
    text = CONFIG.replace("no demo data", str(tiny_shards)).replace("seq_len = 32", "seq_len = 16")
    small = '[model]\nflavor = "debug"\nvocab_size = 256\n[lr_scheduler]\nwarmup_steps = 2\n'
    (folder / "pc.toml").write_text(text.replace("lr = 1e-3", "lr = 1e-3\nhyperball_lr = 1e-2") + small)
    sweep = 'configs = ["pc.toml"]\n[axes]\n"pc.level" = [3, 4]\n"training.steps" = [5, 6, {}]\n'
    steps = Manifest.read(tiny_shards).tokens("train") * 101 // (4 * 16)
    (folder / "level.toml").write_text(sweep.format(steps))
    options = [] if action == "run" else ["--gpus-per-node=1"]
    status, said, err = command("sweep.py", action, "level.toml", *options)
    assert status == 2 and started == [] and err.startswith(f"error: level-3_steps-{steps}: the run repeats its ")
    assert err.endswith("data.max_epochs = 100 allows fewer\n") and err.count("\n") == 1
    finish("pc.toml", ["--pc.level=3", "--training.steps=5"], folder / "outputs/sweeps/level/level-3_steps-5")
    (folder / "level.toml").write_text(sweep.format(7))
    monkeypatch.setattr(
        "pc_recipe.runs.sweep.start.check", lambda *words, **given: checked.append(words) or check(*words, **given)
    )
    status, said, err = command("sweep.py", action, "level.toml", *options)
    warnings = [line for line in (err + said).splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len({line.split(": ", 2)[2] for line in warnings})
    assert "warning: level-3_steps-6: optimizer.hyperball_lr is set, but AdamW does not read it" in warnings
    assert any("made for a GPU" in line for line in warnings) == (action == "run")  # which trains on this machine
    assert len(checked) == len(started) == 5


@pytest.mark.parametrize("what", ["torch", "files", None])
def test_a_run_of_other_code_is_not_reused(folder, trained, capsys, what):
    """After a bug fix the old result would silently come back. The control is a run of the same code."""
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    record = json.dumps({"code": code_version() | ({what: "other"} if what else {})})
    (folder / "outputs" / "by-hand" / "environment.json").write_text(record)
    sweep = load("level.toml")
    equal_runs.take_over([sweep])
    train_all([sweep])
    expected = ["outputs/sweeps/level/level-3", "outputs/sweeps/level/level-4"]
    assert trained == (expected if what else expected[1:])
    assert ("outputs/by-hand is an equal run, but of other code" in capsys.readouterr().out) == bool(what)


@pytest.mark.parametrize("what", ["files", None])
def test_a_run_of_another_sweep_and_of_other_code_is_not_reused(folder, trained, what):
    train_all([load("level.toml")])
    first = Path("outputs/sweeps/level/level-4/environment.json")
    first.write_text(json.dumps({"code": code_version() | ({what: "other"} if what else {})}))
    trained.clear()
    both = [load("level.toml"), load("blocks.toml")]  # level-4 and blocks-ffn+o are equal
    equal_runs.take_over(both, 1)
    train_all(both)
    new = ["outputs/sweeps/blocks/blocks-ffn+o"] if what else []
    assert sorted(trained) == sorted([*new, "outputs/sweeps/blocks/blocks-ffn"])


def test_a_run_that_diverged_is_tried_again_once(folder, trained):
    """Not again through each link to it."""
    finish("pc.toml", [], folder / "outputs/sweeps/level/level-4", state="diverged")
    both = [load("level.toml"), load("blocks.toml")]
    equal_runs.take_over(both, 1)
    assert Path("outputs/sweeps/blocks/blocks-ffn+o").is_symlink()
    [group] = [group for group in equal_runs.group_runs(both, 1) if len(group.runs) == 2]
    assert [run.name for run in group.to_train] == ["level-4"]


def test_a_run_whose_settings_cannot_be_read_is_not_taken_for_an_unchanged_one(folder, trained):
    train_all([load("level.toml")])
    (folder / "outputs/sweeps/level/level-4/config.toml").write_text("[optimizer]\nlr = 'fast'\n")
    with pytest.raises(UserError, match="level-4 was trained with several configurations, or unreadable ones"):
        equal_runs.require_unchanged(load("level.toml"))


def test_a_folder_that_cannot_be_listed_ends_the_search_for_equal_runs(folder, monkeypatch):
    """Otherwise a run would be trained again."""
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    real = os.scandir

    def refuse(path):
        if str(path).endswith("by-hand"):
            raise OSError(errno.EIO, "made by the test", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ReadFailed, match="by-hand"):
        equal_runs.group_runs([load("level.toml")])


def test_the_command_that_takes_a_run_of_other_code_works(folder, trained, capsys):
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by hand")
    (folder / "outputs" / "by hand" / "environment.json").write_text("{}")
    train_all([load("level.toml")])
    command = capsys.readouterr().out.split("to use that one, stop this one and run: ")[1].splitlines()[0]
    subprocess.run(command, shell=True, check=True)
    assert Path("outputs/sweeps/level/level-3").resolve() == folder / "outputs" / "by hand"


def test_a_run_that_ended_while_its_lock_was_waited_for_is_not_trained_again(folder, trained, monkeypatch):
    sweep = load("level.toml")

    def lock_late(run: Path):
        finish("pc.toml", [f"--pc.level={run.name[-1]}"], run)
        return lock(run)

    monkeypatch.setattr("pc_recipe.runs.sweep.local.lock", lock_late)
    train_all([sweep])
    assert trained == [] and not is_locked(sweep.runs[0].folder)


def test_a_run_that_other_code_began_is_not_reused(folder):
    """It was stopped, the code was fixed, and it continued. The controls start again, or continue with the same code on more
    processes."""
    by_hand, config = folder / "outputs" / "by-hand", load_config("pc.toml", ["--pc.level=3"])
    finish("pc.toml", ["--pc.level=3"], by_hand)
    (by_hand / "environment.json").write_text(
        json.dumps({"code": code_version() | {"files": "other"}, "world_size": 1})
    )
    for step, world_size, parts, state in [
        (3, 1, 2, "waiting"),
        (4, 1, 2, "waiting"),
        (0, 1, 1, "finished"),
        (4, 2, 2, "finished"),
    ]:
        environment.write_environment(by_hand, config, world_size, step)
        group = equal_runs.group_runs([load("level.toml")])[0]
        assert (len(run_folder.read_parts(by_hand)), group.state) == (parts, state)
        assert bool(group.of_other_code) == (state == "waiting")


def test_a_batch_that_depends_on_the_ranks_is_compared(folder, command):
    """A run of 8 ranks is not reused if the number of ranks is unknown, and its sweep is not continued on 1."""
    (folder / "pc.toml").write_text(CONFIG.replace("global_batch_size = 4\n", ""))
    by_hand, one = folder / "outputs" / "by-hand", folder / "outputs/sweeps/level/level-3"
    finish("pc.toml", ["--pc.level=3"], by_hand)
    (by_hand / "environment.json").write_text(json.dumps({"code": code_version(), "world_size": 8}))
    assert "reused" not in command("sweep.py", "status", "level.toml")[1] and not one.exists()
    equal_runs.take_over([load("level.toml")], 8)
    assert one.is_symlink() and command("sweep.py", "status", "level.toml")[0] == 0
    with pytest.raises(UserError, match=r"level-3 was trained with training.global_batch_size = 16 \(now 2\)"):
        equal_runs.require_unchanged(load("level.toml"), 1)


@pytest.mark.parametrize("name", ["config.toml", "environment.json"])
@pytest.mark.parametrize("text", ["[1]", "[" * 10_000, "\xff"], ids=range(3))
def test_a_damaged_record_below_outputs_does_not_end_a_plan(folder, name, text):
    finish("pc.toml", ["--pc.level=3"], folder / "outputs" / "by-hand")
    (folder / "outputs" / "by-hand" / name).write_text(text, encoding="latin-1")
    assert [group.state for group in equal_runs.group_runs([load("level.toml")])] == ["waiting", "waiting"]
