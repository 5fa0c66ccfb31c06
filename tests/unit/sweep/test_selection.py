"""What run folders say, and which run is chosen, on run folders written by hand."""

import json
import math
import subprocess
import sys
import tomllib

import pytest

from pc.analysis.bars import read_results
from pc.common.run_folder import is_locked, lock, newest_step, read_log, state_of, time_left
from pc.errors import UserError
from pc.settings import Config
from pc.settings.chain import resolve
from pc.sweep.select import select
from pc.sweep.spec import load

LOSSES = [6.0 - 0.005 * step for step in range(40)]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("[training]\nsteps = 40\n")
    (tmp_path / "sweep.toml").write_text(
        'configs = ["tiny.toml"]\nfolder = "out"\n[axes]\n"optimizer.lr" = { first = 1e-3, last = 8e-3, factor = 2 }\n'
    )
    return load(tmp_path / "sweep.toml")


def write_run(run, final: float | None, losses=LOSSES, state="finished", reason=""):
    run.folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": i + 1, "tokens": 100 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    lines.append({"step": 1, "tokens": 100, "validation_loss": 9.0})
    if final is not None:
        lines.append({"step": len(losses), "tokens": 100 * len(losses), "validation_loss": final})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": state, "step": len(losses), "steps": 40, "reason": reason}
    (run.folder / "status.json").write_text(json.dumps(status))


def test_the_lowest_stable_run_is_chosen(sweep, tmp_path):
    spiky = LOSSES[:30] + [8.0] + LOSSES[31:]
    write_run(sweep.runs[0], 4.5)
    write_run(sweep.runs[1], 4.0)
    write_run(sweep.runs[2], 4.2)
    write_run(sweep.runs[3], 3.0, losses=spiky)  # lowest of all, yet unstable
    said = select(sweep)
    assert "optimizer.lr = 0.002, validation_loss 4.0000" in said
    chosen = tmp_path / "out" / "selected-tiny.toml"
    assert tomllib.loads(chosen.read_text()) == {"parent": "../tiny.toml", "optimizer": {"lr": 0.002}}
    # a config may name it as its parent
    (tmp_path / "pc.toml").write_text('parent = "out/selected-tiny.toml"\n[pc]\nenable = true\n')
    assert resolve(tmp_path / "pc.toml", [], Config).model_dump(exclude_unset=True) == {
        "training": {"steps": 40},
        "optimizer": {"lr": 0.002},
        "pc": {"enable": True},
    }
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [result["validation_loss"] for result in results] == [4.5, 4.0, 4.2, 3.0]
    assert [result["spikes"] for result in results] == [0, 0, 0, 1]
    assert "| 0.008 | 3.0000 | 1 | 1 | no |" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "plot.png").stat().st_size > 1000


def test_the_choice_names_its_parent_from_behind_a_link(sweep, tmp_path):
    """The sweep's folder may be a link to another disk, from where `..` does not lead back."""
    (tmp_path / "disk" / "a" / "b").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "a" / "b")
    for index, run in enumerate(sweep.runs):
        write_run(run, 4.0 + index)
    select(sweep)
    chosen = tmp_path / "out" / "selected-tiny.toml"
    assert resolve(chosen, [], Config).model_dump(exclude_unset=True) == {
        "training": {"steps": 40},
        "optimizer": {"lr": 0.001},
    }


def test_results_keep_the_validation_loss_beside_another_metric(sweep, tmp_path):
    (tmp_path / "sweep.toml").write_text((tmp_path / "sweep.toml").read_text() + '[select]\nmetric = "loss"\n')
    for run in sweep.runs:
        write_run(run, 4.5)
    select(load(tmp_path / "sweep.toml"))
    (result, *_) = read_results(tmp_path / "out")
    assert (result["validation_loss"], result["loss"]) == (4.5, LOSSES[-1])


def test_more_spikes_may_be_allowed(sweep, tmp_path):
    for index, run in enumerate(sweep.runs):
        write_run(run, 4.0 - index, losses=LOSSES[:30] + [8.0 if index == 3 else 5.8] + LOSSES[31:])
    assert "optimizer.lr = 0.004" in select(sweep)
    text = (tmp_path / "sweep.toml").read_text() + "[select]\nspikes_allowed = 1\n"
    (tmp_path / "sweep.toml").write_text(text)
    said = select(load(tmp_path / "sweep.toml"))
    assert "optimizer.lr = 0.008" in said and "an end of its grid" in said


def test_failed_and_unfinished_runs_are_shown_and_never_counted(sweep):
    write_run(sweep.runs[0], 4.5)
    write_run(sweep.runs[1], 1.0, state="failed", reason="disk full")
    write_run(sweep.runs[2], 1.0, state="stopped", reason="asked to stop")
    said = select(sweep)
    assert "optimizer.lr = 0.001" in said and "provisional: 3 runs" in said
    assert "lr-0.002: failed disk full" in said and "lr-0.008: waiting" in said


def test_a_diverged_run_is_unstable(sweep):
    for run in sweep.runs[:3]:
        write_run(run, 4.5)
    write_run(sweep.runs[3], 1.0, losses=[*LOSSES[:-1], None])  # the trainer writes NaN as null
    assert "| 0.008 | 1.0000 | 1 | 1 | no |" in select(sweep)


def test_a_run_that_stopped_because_it_diverged_is_a_result_without_a_loss(sweep, tmp_path):
    for run in sweep.runs[:3]:
        write_run(run, 4.5)
    write_run(sweep.runs[3], 1.0, state="diverged", reason="not finite in 3 steps in a row")  # 1.0: before it diverged
    said = select(sweep)
    assert "optimizer.lr = 0.001" in said and said.count("- lr-0.008: diverged not finite in 3 steps in a row") == 1
    result = read_results(tmp_path / "out")[3]
    assert (result["name"], result["state"], result["validation_loss"]) == ("lr-0.008", "diverged", None)


def test_nothing_stable_selects_nothing(sweep, tmp_path):
    for run in sweep.runs:
        write_run(run, 4.0, losses=LOSSES[:30] + [8.0] + LOSSES[31:])
    assert "nothing selected" in select(sweep)
    assert not (tmp_path / "out" / "selected-tiny.toml").exists()


def test_a_metric_that_no_run_wrote(sweep, tmp_path):
    write_run(sweep.runs[0], 4.0)
    (tmp_path / "sweep.toml").write_text((tmp_path / "sweep.toml").read_text() + '[select]\nmetric = "accuracy"\n')
    with pytest.raises(UserError, match="no finished run has a finite 'accuracy'"):
        select(load(tmp_path / "sweep.toml"))


def test_no_finished_run(sweep):
    with pytest.raises(UserError, match="no finished run has"):
        select(sweep)


def test_seeds_are_averaged_and_must_all_finish(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("[training]\nsteps = 40\n")
    (tmp_path / "sweep.toml").write_text(
        'configs = ["tiny.toml"]\nfolder = "out"\nseeds = [0, 1]\n[axes]\n"pc.level" = [1, 2, 3]\n'
    )
    sweep = load(tmp_path / "sweep.toml")
    for run, final in zip(sweep.runs, [4.0, 5.0, 4.1, 4.3, 1.0], strict=False):
        write_run(run, final)
    said = select(sweep)
    assert "pc.level = 2, validation_loss 4.2000" in said  # level 3 has one seed only
    chosen = tomllib.loads((tmp_path / "out" / "selected-tiny.toml").read_text())
    assert chosen == {"parent": "../tiny.toml", "pc": {"level": 2}}


def test_the_last_line_of_a_step_wins_and_half_a_line_is_none(tmp_path):
    lines = [
        '{"step": 1, "tokens": 1, "loss": 5.0}',
        '{"step": 2, "tokens": 2, "loss": 4.0}',
        '{"step": 2, "tokens": 2, "loss": 3.0}',
        '{"step": 3, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_log(tmp_path).series("loss").values == [5.0, 3.0]


def test_time_left_is_by_the_recent_pace():
    assert time_left([10, 20], [100.0, 160.0], 120) == "about 0:10:00 left"
    assert time_left([10, 20], [100.0, 160.0], 20) == "about 0:00:00 left"
    assert time_left([20], [160.0], 120) == time_left([20, 20], [160.0, 161.0], 120) == ""


def test_a_dead_run_that_said_running_is_interrupted(sweep):
    run = sweep.runs[0]
    assert state_of(run.folder).state == "waiting"
    write_run(run, None, state="running")
    assert state_of(run.folder).state == "interrupted"
    with lock(run.folder):
        assert state_of(run.folder).state == "running"
        with pytest.raises(UserError, match="another process is training here"):
            lock(run.folder)
    assert state_of(run.folder).state == "interrupted"


def test_the_lock_outlives_its_launcher_in_the_trainer(sweep):
    run = sweep.runs[0]
    with lock(run.folder) as held:
        trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held.fileno()])
    assert is_locked(run.folder)
    trainer.communicate(b"\n")
    assert not is_locked(run.folder)


def test_latest_checkpoint_counts_complete_ones(tmp_path):
    for step, complete in ((5, True), (10, True), (15, False)):
        folder = tmp_path / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        if complete:
            (folder / ".metadata").touch()
    assert newest_step(tmp_path) == 10
    assert newest_step(tmp_path / "none") == 0


def test_a_finished_run_without_a_loss_is_named(sweep):
    for run in sweep.runs[:3]:
        write_run(run, 4.5)
    write_run(sweep.runs[3], math.nan)
    said = select(sweep)
    assert "- lr-0.008: finished, but its last validation_loss is not a finite number" in said
    assert "provisional: 1 runs of tiny are not counted" in said
