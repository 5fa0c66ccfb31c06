"""What run folders say, and which run is chosen; the folders are written by hand."""

import errno
import json
import math
import os
import tomllib
from pathlib import Path

import pytest

from helpers.made_runs import write_run
from pc.errors import UserError
from pc_recipe.config import write_config
from pc_recipe.files.errors import ReadFailed
from pc_recipe.files.lock import join_lock, lock
from pc_recipe.files.run_folder import keep_earlier_config, read_state
from pc_recipe.files.run_log import read_log
from pc_recipe.runs.sweep.points import read_results
from pc_recipe.runs.sweep.results import describe_status, read_result
from pc_recipe.runs.sweep.select import select
from pc_recipe.runs.sweep.spec import load

LOSSES = [6.0 - 0.005 * step for step in range(40)]
SPIKY = LOSSES[:30] + [8.0] + LOSSES[31:]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Four learning rates; the working directory is the sweep's folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("[training]\nsteps = 40\n")
    (tmp_path / "sweep.toml").write_text(
        'configs = ["tiny.toml"]\nfolder = "out"\n[axes]\n"optimizer.lr" = [1e-3, 2e-3, 4e-3, 8e-3]\n'
    )
    return load("sweep.toml")


def end(run, final: float | None, losses=LOSSES, state="finished", reason="", every=1) -> None:
    """Let a run end with a validation loss, or with none after the first; one in `every` steps has a loss."""
    lines = [{"step": every * (i + 1), "tokens": 100 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    lines.append({"step": 1, "tokens": 100, "validation_loss": 9.0})
    lines += [] if final is None else [{"step": 40 * every, "tokens": 4000, "validation_loss": final}]
    write_run(run.folder, lines, state, reason)


def end_all(sweep, *finals: float) -> None:
    for run, final in zip(sweep.runs, finals, strict=False):
        end(run, final)


def test_the_lowest_stable_run_is_chosen(sweep, tmp_path):
    end_all(sweep, 4.5, 4.0, 4.2)
    end(sweep.runs[3], 3.0, losses=SPIKY)  # the lowest, but unstable
    said = select(sweep)
    assert "optimizer.lr = 0.002, validation_loss 4.0000" in said
    chosen = tmp_path / "out" / "selected-tiny.toml"
    assert tomllib.loads(chosen.read_text()) == {"parent": "../tiny.toml", "optimizer": {"lr": 0.002}}
    results = read_results(tmp_path / "out")
    assert [result["validation_loss"] for result in results] == [4.5, 4.0, 4.2, 3.0]
    assert [result["spikes"] for result in results] == [0, 0, 0, 1]
    assert "| 0.008 | 3.0000 | 1 | 1 | no |" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("every", [12, 13])
def test_spikes_that_cannot_be_looked_for_are_unknown(sweep, tmp_path, every):
    """The 50 steps before a loss have no five others if one in 13 is logged. A loss that is not finite is seen all the same."""
    end_all(sweep, 4.5, 4.0)
    end(sweep.runs[2], 3.0, losses=SPIKY, every=every)
    end(sweep.runs[3], 2.0, losses=[*LOSSES[:-1], None], every=every)
    said, table = select(sweep), (tmp_path / "out" / "table.md").read_text()
    assert [result["spikes"] for result in read_results(tmp_path / "out")] == [0, 0, 1 if every == 12 else None, 1]
    assert f"| 0.004 | 3.0000 | 1 | {'1 | no' if every == 12 else '- | unknown'} |" in table
    assert "| 0.008 | 2.0000 | 1 | 1 | no |" in table and "| 0.002 | 4.0000 | 1 | 0 | yes |" in table
    assert f"optimizer.lr = {0.002 if every == 12 else 0.004}, " in said
    assert ("\n  note: whether this is stable is not known" in said) == (every == 13)


def test_an_unknown_seed_makes_a_setting_unknown(sweep, tmp_path):
    (tmp_path / "sweep.toml").write_text('configs = ["tiny.toml"]\nfolder = "out"\nseeds = [0, 1]\n')
    sweep = load("sweep.toml")
    end(sweep.runs[0], 4.0)
    end(sweep.runs[1], 4.0, every=13)
    assert "note: whether this is stable is not known" in select(sweep)
    assert "| 4.0000 | 2 | - | unknown |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    "axis, said",
    [
        (
            '"training.seq_len" = [128, 256]',
            "on other sequences than .*; compare runs with one training.seq_len, not 128 and 256",
        ),
        ('"data.path" = ["data", "data2"]', "on other text than .*; compare runs with one data.validation_path"),
        ('"data.path" = ["tests", "other/tests"]', None),  # by content
        ('"model.n_layers" = [2, 4]', None),
    ],
)
def test_losses_that_cannot_be_compared_are_not_ranked(sweep, tmp_path, axis, said):
    """A run without a loss does not matter."""
    (tmp_path / "sweep.toml").write_text(f'configs = ["tiny.toml"]\nfolder = "out"\n[axes]\n{axis}\n')
    sweep = load("sweep.toml")
    for run, final in zip(sweep.runs, (None, 4.0), strict=True):
        end(run, final)
        write_config(run.resolved, run.folder / "config.toml")
        data = {"content of data.validation_path": run.resolved.data.path[-5:]}
        (run.folder / "environment.json").write_text(json.dumps({"data": data}))
    assert "validation_loss 4.0000" in select(sweep)
    end(sweep.runs[0], 3.0)
    if said:
        with pytest.raises(UserError, match=f"{sweep.runs[1].folder} was validated {said}") as raised:
            select(sweep)
        assert "\n" not in str(raised.value) and "3.0000" not in (tmp_path / "out" / "table.md").read_text()
    else:
        assert "validation_loss 3.0000" in select(sweep)


def test_only_runs_that_finished_with_a_loss_are_counted(sweep):
    end(sweep.runs[0], 4.5)
    end(sweep.runs[1], 1.0, state="failed", reason="disk full")
    end(sweep.runs[2], math.nan)
    said = select(sweep)
    assert "optimizer.lr = 0.001" in said and "provisional: 3 runs of tiny have no loss" in said
    assert [line.split() for line in describe_status(sweep).splitlines()] == [
        ["lr-0.001", "finished", "40/40"],
        ["lr-0.002", "failed", "40/40", "disk", "full"],
        ["lr-0.004", "finished", "40/40"],
        ["lr-0.008", "waiting"],
        ["2", "finished,", "1", "failed,", "1", "waiting"],
    ]


def test_a_final_loss_is_that_of_the_last_step(sweep):
    """After a crash of the machine, the end of the log may be lost, but not status.json."""
    end_all(sweep, 4.5, 4.4, 4.6, 4.7)
    log = sweep.runs[0].folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"validation_loss": 4.5', '"other": 4.5'))
    assert read_result(sweep.runs[0])["validation_loss"] is None
    assert read_result(sweep.runs[1])["validation_loss"] == 4.4


def test_a_run_that_diverged_is_a_result_without_a_loss(sweep, tmp_path):
    end_all(sweep, 4.5, 4.5)
    end(sweep.runs[2], 1.0, losses=[*LOSSES[:-1], None])  # the trainer writes NaN as null; one is a spike
    end(sweep.runs[3], 1.0, state="diverged", reason="not finite in 3 steps in a row")  # 1.0: before it diverged
    said = select(sweep)
    assert "| 0.004 | 1.0000 | 1 | 1 | no |" in said
    assert "optimizer.lr = 0.001" in said and "| 0.008 |" not in said
    result = read_results(tmp_path / "out")[3]
    assert (result["name"], result["state"], result["validation_loss"]) == ("lr-0.008", "diverged", None)


def test_nothing_stable_selects_nothing(sweep, tmp_path):
    for run in sweep.runs:
        end(run, 4.0, losses=SPIKY)
    assert "nothing selected" in select(sweep)
    assert not (tmp_path / "out" / "selected-tiny.toml").exists()


def test_seeds_are_averaged_and_must_all_finish(sweep, tmp_path):
    (tmp_path / "sweep.toml").write_text(
        'configs = ["tiny.toml"]\nfolder = "out"\nseeds = [0, 1]\n[axes]\n"pc.level" = [1, 2, 3]\n'
    )
    sweep = load("sweep.toml")
    end_all(sweep, 4.0, 5.0, 4.1, 4.3, 1.0)
    assert "pc.level = 2, validation_loss 4.2000" in select(sweep)  # level 3 has one seed only
    chosen = tomllib.loads((tmp_path / "out" / "selected-tiny.toml").read_text())
    assert chosen == {"parent": "../tiny.toml", "pc": {"level": 2}}


def test_a_key_that_the_best_leaves_unset_is_not_written(sweep, tmp_path):
    (tmp_path / "sweep.toml").write_text(
        'configs = ["tiny.toml"]\nfolder = "out"\n[variants.plain]\n[variants.wsd]\n"lr_scheduler.decay_ratio" = 0.2\n'
    )
    sweep = load("sweep.toml")
    end_all(sweep, 4.0, 5.0)
    assert "tiny: its own values, validation_loss 4.0000" in select(sweep)
    assert tomllib.loads((tmp_path / "out" / "selected-tiny.toml").read_text()) == {"parent": "../tiny.toml"}


def test_the_last_line_of_a_step_wins(tmp_path):
    lines = [{"step": 1, "tokens": 1, "loss": None}] + [{"step": 2, "tokens": 2, "loss": x} for x in (4.0, 3.0)]
    found = read_log(write_run(tmp_path, lines)).series("loss").values
    assert found == pytest.approx([math.nan, 3.0], nan_ok=True)


def test_a_dead_run_that_said_running_is_interrupted(tmp_path):
    assert read_state(tmp_path).state == "waiting"
    for name in ("lock", "lock.ranks"):
        (tmp_path / name).touch(0o644)  # as older versions did
    write_run(tmp_path, [], "running")
    assert read_state(tmp_path).state == "interrupted"
    with lock(tmp_path):
        assert read_state(tmp_path).state == "running"
        with pytest.raises(UserError, match="another process is training here"):
            lock(tmp_path)
    assert read_state(tmp_path).state == "interrupted"
    with join_lock(tmp_path), join_lock(tmp_path):  # two ranks whose launcher was killed
        assert read_state(tmp_path).state == "running"
        with pytest.raises(UserError, match="another process is training here"):
            lock(tmp_path)
    with lock(tmp_path), join_lock(tmp_path):  # a launcher and its rank
        assert read_state(tmp_path).state == "running"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("lock*")} == {0o600}  # other users cannot hold them


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"state": "finished"}',
        "\xff",
        "[" * 10_000,
        '{"state": "done", "step": 1, "steps": 2}',
        '{"state": "stopped", "step": null, "steps": 2}',
    ],
    ids=range(8),
)
def test_a_damaged_status_is_that_of_an_interrupted_run(tmp_path, text):
    """One such run in outputs/ must not end every sweep's plan and status with a traceback."""
    (tmp_path / "status.json").write_text(text, encoding="latin-1")
    state = read_state(tmp_path)
    assert (state.state, state.step) == ("interrupted", 0) and "status.json cannot be read" in state.reason


def test_ranks_whose_lock_cannot_be_read_are_not_taken_for_dead(tmp_path, monkeypatch):
    """As if a file server had lost the file; otherwise a second trainer would start beside the ranks."""

    def refuse(file, *rest):
        if Path(file).name == "lock.ranks":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))
        return real(file, *rest)

    (tmp_path / "lock.ranks").touch()
    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    for ask in (lock, read_state):
        with pytest.raises(ReadFailed, match=r"lock\.ranks"):
            ask(tmp_path)


def test_a_damaged_config_of_an_earlier_part_is_kept_aside(tmp_path):
    (tmp_path / "config.toml").write_text("[job")
    keep_earlier_config(tmp_path, {}, step=3)
    assert (tmp_path / "config.1.toml").read_text() == "[job"
