"""Kills and long runs: nothing is lost, nothing grows."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers import tiny
from helpers.ranks import run_ranks
from pc.common.run_folder import is_locked, lock
from pc.errors import UserError

pytestmark = pytest.mark.soak


KILLS = 8


def _nothing(rank):
    pass


def _train_until_killed(rank, config, overrides, delay):
    if rank == 1:
        killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    return tiny.train(rank, config, overrides)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_kills_at_random_moments(tiny_config, tmp_path, mode):
    """One of two ranks is killed again and again, with a save after every step and a validation after every second."""
    config, _ = tiny_config
    words = ["--training.steps=16", "--checkpoint.interval=1", "--validation.freq=2", f"--checkpoint.async_mode={mode}"]
    run_ranks(2, _nothing)  # the server that ranks are forked from takes longer to start than the run does
    begin = time.monotonic()
    run_ranks(2, tiny.train, config, [*words, f"--job.dump_folder={tmp_path}/straight"])
    longest = time.monotonic() - begin
    expected = [tiny.metrics(tmp_path / "straight", key) for key in ("loss", "validation_loss")]
    draw, kills, finished = random.Random(0), 0, 0
    while kills < KILLS or not finished:
        folder = tmp_path / f"killed-{finished}"
        delay = draw.uniform(0, longest) if kills < KILLS else 1e6
        try:
            run_ranks(2, _train_until_killed, config, [*words, f"--job.dump_folder={folder}"], delay)
        except AssertionError as error:  # the other rank's
            assert "UserError" not in str(error), error
            kills += 1
            continue
        assert [tiny.metrics(folder, key) for key in ("loss", "validation_loss")] == expected
        finished += 1
    print(f"{kills} kills, {finished} runs, each equal to the undisturbed one")


def test_a_long_run_does_not_grow(tiny_config, tmp_path):
    """1,000 steps of the tiny model; the same with a restart every 250 has the same losses."""
    config, _ = tiny_config
    words = ["--training.global_batch_size=2", "--validation.freq=500", "--lr_scheduler.total_steps=1000"]
    words += ["--checkpoint.interval=100", "--checkpoint.keep_latest_k=2"]
    straight, restarted = ([*words, f"--job.dump_folder={tmp_path}/{name}"] for name in ("straight", "restarted"))
    (sizes,) = run_ranks(1, _train_and_measure, config, [*straight, "--training.steps=1000"], timeout=1800)
    print(sizes)
    settled, last = sizes[4], sizes[-1]
    assert last["threads"] == settled["threads"] and last["files"] == settled["files"]
    assert last["bytes"] < settled["bytes"] + 8 * 2**20  # 500 steps: 16 KB each
    for step in range(250, 1001, 250):
        run_ranks(1, tiny.train, config, [*restarted, f"--training.steps={step}"])
    assert tiny.metrics(tmp_path / "restarted") == tiny.metrics(tmp_path / "straight")


def _train_and_measure(rank, config, overrides):
    """Resident bytes, threads and open files after every hundredth step."""
    trainer = tiny.make_trainer(config, overrides)
    sizes, step = [], trainer.train_step

    def measured(data):
        step(data)
        if trainer.step % 100 == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            files = len(os.listdir("/proc/self/fd"))
            sizes.append({"bytes": resident, "threads": len(os.listdir("/proc/self/task")), "files": files})

    trainer.train_step = measured
    trainer.train()
    trainer.close()
    return sizes


def test_ranks_keep_their_folder_when_launcher_and_agent_are_killed(tiny_config, tmp_path):
    config, folder = Path(tiny_config[0]), tmp_path / "run"
    config.write_text(config.read_text().replace('"tiny"', '"nano"'))  # a size that other processes know
    words = [sys.executable, "-m", "pc.launch.local", str(config), f"--job.dump_folder={folder}"]
    launcher = subprocess.Popen([*words, "--training.steps=100000"], env=os.environ | {"NGPU": "2"}, cwd=tiny.ROOT)
    while not (folder / "metrics.jsonl").exists():
        assert launcher.poll() is None
        time.sleep(0.5)
    (agent,) = _children(launcher.pid)
    ranks = _children(agent)
    for process in (launcher.pid, agent):
        os.kill(process, signal.SIGKILL)
    launcher.wait()
    try:
        assert len(ranks) == 2 and is_locked(folder)
        with pytest.raises(UserError, match="another process is training here"):
            lock(folder)
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    while is_locked(folder):
        time.sleep(0.1)


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
