"""Odd settings that the checks accept, each trained for two steps: it trains, or ends in a line or two."""

import os
import random
import signal
from pathlib import Path

import pytest

from helpers import tiny
from helpers.odd_configs import settings
from helpers.ranks import run_ranks

SECONDS = 60  # most of them for compilation


def _start(rank, config: Path, folder: Path, starts: int) -> dict[str, list[str]]:
    """What became of settings in a random order, until so many have been started.

    "refused", "stopped" (a `UserError` at the start), "trained", or what is wrong.
    """
    from pc.errors import UserError

    def end(*_):
        raise TimeoutError(f"still not done after {SECONDS} s")

    signal.signal(signal.SIGALRM, end)
    tiny.add_tiny_flavor()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)  # for runs whose folder is odd
    found: dict[str, list[str]] = {"refused": [], "stopped": [], "trained": [], "wrong": []}
    cases = settings()
    for number, (key, value) in enumerate(random.Random(0).sample(cases, len(cases))):
        if number - len(found["refused"]) == starts:
            break
        setting = f"--{key}={value}"
        run = folder / str(number)
        signal.alarm(SECONDS)
        try:
            if _is_refused(config, setting):
                outcome = "refused"
            else:
                tiny.train(rank, config, [f"--job.dump_folder={run}", "--training.steps=2", setting])
                outcome = "trained"
        except UserError as error:
            said = str(error)
            outcome = "stopped" if said.count("\n") <= 1 else "wrong"
            setting += f" -> {said[:300]}"
        except BaseException as error:
            outcome, setting = "wrong", f"{setting} -> {type(error).__name__}: {str(error)[:300]}"
        finally:
            signal.alarm(0)
        found[outcome].append(setting)
    return found


def _is_refused(config: Path, setting: str) -> bool:
    from pc.errors import UserError
    from pc.plan.dry_run import check

    try:
        return bool(check(config, [setting], 1).errors)
    except UserError:
        return True


@pytest.mark.parametrize("starts", [6, pytest.param(60, marks=pytest.mark.soak)], ids=["some", "more"])
def test_what_the_checks_accept_can_be_trained(tiny_shards, tmp_path, starts):
    config = tiny.write_config(tmp_path / "tiny.toml", tiny_shards, tmp_path / "run")
    (found,) = run_ranks(1, _start, config, tmp_path, starts, timeout=3000.0)
    print({outcome: len(settings) for outcome, settings in found.items()})
    print("\n".join(found["stopped"]))
    assert not found["wrong"], "\n".join(found["wrong"])
    assert len(found["trained"]) >= starts / 2 and found["refused"]  # control: they do start, and not all are accepted
