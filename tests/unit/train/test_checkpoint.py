"""When a run saves, and which checkpoints stay; unit/checkpoints tests what is loaded, test_refusals.py disks that fail."""

import queue
from types import SimpleNamespace

import pytest
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager

from helpers.tiny import make_checkpoints
from pc_recipe.train import checkpoint

pytestmark = pytest.mark.usefixtures("one_process")


def _saved_steps(manager, steps: int = 16, agreed=()) -> list[int]:
    """The steps after which it saves if all ranks have agreed to in some; the last is one."""
    found = []
    for step in range(1, steps + 1):
        manager.save_is_due = step in agreed
        found += [step] if manager._should_save(step, last_step=step == steps) else []
    return found


def test_a_save_is_due_by_the_interval_by_agreement_and_for_a_milestone(tmp_path):
    assert _saved_steps(make_checkpoints(tmp_path, interval=7), agreed=(3, 7)) == [3, 7, 14, 16]
    assert _saved_steps(make_checkpoints(tmp_path, interval=7, keep_every=6)) == [6, 7, 12, 14, 16]
    assert _saved_steps(make_checkpoints(tmp_path, enable=False, keep_every=6), agreed=(3,)) == []


@pytest.mark.parametrize("enable", [True, False])
def test_its_folder_is_in_the_run_also_if_it_saves_nothing(tmp_path, enable):
    manager = make_checkpoints(tmp_path, enable=enable)
    assert (manager.run, manager.folder) == (tmp_path, tmp_path / "checkpoint")


def test_minutes_are_counted_from_the_newest_save(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    manager, without = make_checkpoints(tmp_path, minutes=1), make_checkpoints(tmp_path, minutes=0)
    now = 1059.0
    assert not manager.minutes_are_over()
    now = 1060.0
    assert manager.minutes_are_over() and not without.minutes_are_over()
    manager.dcp_save({"method": {"fingerprint": "{}"}}, str(tmp_path / "checkpoint" / "step-3"), AsyncMode.DISABLED)
    assert not manager.minutes_are_over()
    now = 1120.0
    assert manager.minutes_are_over()


def test_a_skipped_step_is_saved_only_as_the_last(tmp_path, monkeypatch):
    """TorchTitan then saves an empty step, or ends an asynchronous save."""
    saved: list = []
    monkeypatch.setattr(CheckpointManager, "save", lambda self, *given: saved.append(given))
    manager = make_checkpoints(tmp_path)
    for skips in (False, True):
        manager._optimizers = SimpleNamespace(skips_step=skips)
        manager.save(3)
        manager.save(4, last_step=True)
    assert saved == [(3, False), (4, True), (4, True)]


@pytest.mark.parametrize(
    "keep_latest_k, keep_every, stay",
    [(0, 0, range(2, 12)), (2, 0, (10, 11)), (2, 3, (3, 6, 9, 10, 11)), (3, 4, (4, 8, 9, 10, 11))],
)
def test_the_newest_and_the_milestones_stay(tmp_path, keep_latest_k, keep_every, stay):
    """Folders that are not named step-N are not checkpoints, and stay too."""
    folder, others = tmp_path / "checkpoint", ["step-2.kept", "best-step-1", "step-40.bad", "step-007", "notes"]
    for name in [*others, *(f"step-{step}" for step in range(2, 12))]:
        (folder / name).mkdir(parents=True)
        (folder / name / ".metadata").touch()
    manager = make_checkpoints(tmp_path, keep_latest_k=0, keep_every=keep_every)
    manager.keep_latest_k = keep_latest_k  # here, so that TorchTitan has started no thread that deletes
    manager._saving, manager.purge_queue = folder / "step-11", queue.Queue()
    manager._purge_stale_checkpoints()
    purged = {f"step-{step}" for step in range(2, 12)} - {f"step-{step}" for step in stay}
    assert {path.name for path in folder.iterdir()} == {*others, *(f"step-{step}" for step in stay)} | {
        f"{name}.purged" for name in purged
    }
    assert sorted(manager.purge_queue.queue) == sorted(str(folder / f"{name}.purged") for name in purged)
