"""Odd settings that the checks accept, each trained for two steps: it trains, or ends in a line or two."""

import os
import signal
import sys
from pathlib import Path

import pytest

from helpers import tiny
from helpers.odd_configs import settings
from helpers.ranks import run_ranks

SECONDS = 60  # most of them for compilation


def _start(rank, config: Path, folder: Path, cases: list[tuple[str, str]]) -> dict[str, list[str]]:
    """What became of each: "refused", "stopped" (a `UserError` at the start), "trained", or what is wrong."""
    from pc.errors import UserError

    def end(*_):
        raise TimeoutError(f"still not done after {SECONDS} s")

    signal.signal(signal.SIGALRM, end)
    tiny.add_tiny_flavor()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)  # for runs whose folder is odd
    found: dict[str, list[str]] = {"refused": [], "stopped": [], "trained": [], "wrong": []}
    for number, (key, value) in enumerate(cases):
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
        if number % 50 == 0:
            print(f"{number} of {len(cases)}", file=sys.stderr, flush=True)
    return found


def _is_refused(config: Path, setting: str) -> bool:
    from pc.errors import UserError
    from pc.plan.dry_run import check

    try:
        return bool(check(config, [setting], 1).errors)
    except UserError:
        return True


@pytest.mark.parametrize("every", [97, pytest.param(7, marks=pytest.mark.soak)], ids=["some", "more"])
def test_what_the_checks_accept_can_be_trained(tiny_shards, tmp_path, every):
    config = tiny.write_config(tmp_path / "tiny.toml", tiny_shards, tmp_path / "run")
    cases = settings()[::every]
    (found,) = run_ranks(1, _start, config, tmp_path, cases, timeout=3000.0)
    print({outcome: len(settings) for outcome, settings in found.items()})
    print("\n".join(found["stopped"]))
    assert not found["wrong"], "\n".join(found["wrong"])
    assert len(found["trained"]) > len(cases) / 20  # control: not everything is refused
