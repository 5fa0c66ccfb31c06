"""Everything to be measured on a GPU, in order of value, within a given time.

    python benchmarks/all_rows.py --minutes 9 --output results/DATE-gpu

Repeat it to continue: finished tasks are skipped, failed ones are retried. It installs nothing. It prints the machine,
then runs tests/gpu (training, resume and compilation as on the CPU, the exchange, passes against float64), both passes of a 1B layer by
precision, and the rows of `step.py`. Each is a separate process with a time limit and a log in OUTPUT/logs.
Rows write their JSON after every round, so a time limit loses at most one round.

OUTPUT/README.md has the table with its goals. `--tiny` runs everything with tiny shapes, also without a GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a fresh clone need not be installed
# ruff: noqa: E402

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.files.atomic import write_atomically
from pc_recipe.pages import markdown
from rows import table

STEP = str(ROOT / "benchmarks" / "step.py")
# Row: estimated seconds on one H100, compilation included.
ORDER: dict[str, int] = {
    "pc": 180, "stock": 180, "muon": 240, "dtype": 240, "checkpointing": 240, "attention": 180,
    "float8": 180, "in-graph": 240, "memory": 180, "271m": 120, "paper-batch": 420,
}  # fmt: skip
TINY = ["--flavor", "debug", "--seq-len", "16", "--local-batch-size", "1", "--micro-batches", "2", "--rounds", "1"]
# Rows whose variants need 80 to 100 GiB together: on smaller GPUs with half the micro-batch, and the same tokens per step.
LARGE = {"pc", "stock", "muon", "dtype", "checkpointing"}
HALVED = ["--local-batch-size", "2", "--micro-batches", "20"]
LEAST_SECONDS = 45
"""Nothing is started when less time is left."""


@dataclass(frozen=True)
class Task:
    name: str
    command: list[str]
    seconds: int
    """Time limit."""


def tasks(output: Path, tiny: bool) -> list[Task]:
    """All tasks, in order of value."""
    python = sys.executable
    queue = [
        Task("smoke", [python, "-m", "pytest", "-q", "--gpu", str(ROOT / "tests" / "gpu")], 600),
        Task(
            "passes",
            [python, str(ROOT / "benchmarks" / "products.py"), "--flavor", "debug" if tiny else "1B",
             "--output", str(output)],
            90,
        ),
        Task("precision", [python, str(ROOT / "benchmarks" / "precision.py"), *(["--width", "32"] if tiny else [])], 60),
    ]  # fmt: skip
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0
    for row, seconds in ORDER.items():
        shape = TINY if tiny else HALVED if row in LARGE and gib < 110 else []
        queue.append(Task(row, [python, STEP, row, "--output", str(output), *shape], 2 * seconds))
    return queue


def run(task: Task, limit: float, log: Path, tiny: bool) -> str:
    """Run a task; returns "done" or what went wrong."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if tiny:  # compiling takes minutes on a CPU
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if not torch.cuda.is_available():
            environment["PC_GPU_TESTS_ON"] = "cpu"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            task.command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes it started
                process.wait()
    if code == 0:
        return "done"
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return f"over {limit:.0f} s" if code is None else f"failed: {last[0].strip() if last else f'status {code}'}"


def machine() -> dict[str, str]:
    """The hardware and versions of the figures."""
    gpu = torch.cuda.is_available()
    memory = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB" if gpu else ""
    return {
        "hardware": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {memory}" if gpu else "CPU",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }


def report(output: Path, state: dict[str, str], tiny: bool) -> str:
    text = ["# Measurements" + (" with tiny shapes, which say nothing about speed" if tiny else ""), ""]
    text += [f"- {key}: {value}" for key, value in machine().items()]
    states = [(task.name, state.get(task.name, "not run")) for task in tasks(output, tiny)]
    return "\n".join([*text, "", markdown.table(["task", "state"], states), table(output)])


@exit_on_user_error
def main(arguments: list[str] | None = None) -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="time after which to stop (default: 9)")
    parser.add_argument("--output", type=Path, required=True, help="folder of JSON, logs and README.md")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try everything")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not chosen.tiny:
        parser.error("torch sees no GPU here; --tiny runs everything with tiny shapes on a CPU")
    output = chosen.output.resolve()
    file = output / "all_rows.json"
    here = machine() | {"shapes": "tiny" if chosen.tiny else "those of the rows"}
    before = json.loads(file.read_text()) if file.exists() else {"machine": here, "state": {}}
    if others := [f"{key} {before['machine'].get(key)}" for key in here if before["machine"].get(key) != here[key]]:
        raise UserError(f"{output} has figures of {', '.join(others)}; give another --output")
    state: dict[str, str] = before["state"]
    for key, value in here.items():
        print(f"{key}: {value}")
    for task in tasks(output, chosen.tiny):
        left = started + 60 * chosen.minutes - time.monotonic()
        if state.get(task.name) == "done":
            continue
        if left < LEAST_SECONDS:
            print(f"{left:.0f} s left: repeat the command to continue with {task.name}")
            break
        print(f"{task.name} ({min(left, task.seconds):.0f} s at most) ...", flush=True)
        begun = time.monotonic()
        state[task.name] = run(task, min(left, task.seconds), output / "logs" / f"{task.name}.log", chosen.tiny)
        print(f"{task.name}: {state[task.name]} after {time.monotonic() - begun:.0f} s", flush=True)
        write_atomically(file, json.dumps({"machine": here, "state": state}, indent=1) + "\n")
        write_atomically(output / "README.md", report(output, state, chosen.tiny))
    print(report(output, state, chosen.tiny))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `run` ends what it started
    main()
