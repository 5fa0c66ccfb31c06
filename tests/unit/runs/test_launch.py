"""The command that trains: how many processes it starts, what the machine must have, how it treats signals and errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
from torchtitan.components.metrics import WandBLogger

from helpers.tiny import ROOT
from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.files.lock import is_locked, join_lock, lock
from pc_recipe.plan import installed
from pc_recipe.runs import launch
from pc_recipe.train import cpu
from pc_recipe.train.upstream_config import JobConfig


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(GPUs that torch sees, GPUs that SLURM gave, whether there is a device file, NGPU)"""

    def machine(seen: int, given: int | None = None, device: bool = False, wish: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(cpu, "GPU", str(tmp_path if device else tmp_path / "none"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", "" if given is None else str(given))
        monkeypatch.setenv("NGPU", wish)

    return machine


@pytest.mark.parametrize(
    "seen, given, wish, expected",
    [(0, None, "", 1), (4, None, "", 4), (4, None, "2", 2), (0, None, "3", 3), (8, 8, "", 8), (7, 8, "4", 4)],
)
def test_count_processes(machine, seen, given, wish, expected):
    machine(seen, given, device=seen > 0, wish=wish)
    assert launch.count_processes() == expected


@pytest.mark.parametrize("wish, gpus", [("0", 0), ("two", 0), ("5", 4)])
def test_wrong_ngpu(machine, wish, gpus):
    machine(gpus, wish=wish)
    with pytest.raises(UserError, match=f"NGPU={wish}"):
        launch.count_processes()


def test_gpus_that_are_missing_or_that_torch_cannot_use(machine, monkeypatch):
    machine(7, given=8)
    with pytest.raises(SystemExit, match="shows 7 of the 8 GPUs of this job"):  # status 1: requeued
        launch.count_processes()
    for given, device in ((8, False), (None, True)):
        machine(0, given, device)
        for trains in (launch.count_processes, cpu.use_cpu_where_there_is_no_gpu):
            with pytest.raises(UserError, match="has GPUs that torch .* cannot use"):
                trains()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.count_processes() == 1  # as requested


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_ranks_of_one_machine_listen_only_on_the_loopback(machine, monkeypatch, tmp_path, processes):
    """torch's TCP stores listen everywhere, and their content is unpickled. A cluster's profile may name an interface."""
    machine(0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of_the_cluster")
    monkeypatch.setattr(launch, "TRAINER", "helpers.listens")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    config = Config(job={"dump_folder": str(tmp_path)})
    command, environment = launch.build_command(config, processes)
    assert launch.run_command(command, environment) == 0
    found = [json.loads((tmp_path / f"listens.{rank}.json").read_text()) for rank in range(processes)]
    assert found == [["127.0.0.1"]] * processes
    assert os.stat(environment["PC_MEETING_PLACE"]).st_mode & 0o077 == 0


@pytest.mark.parametrize("name, value", [("PET_NNODES", "2"), ("PET_STANDALONE", "1")])
def test_torchrun_takes_no_options_from_outside(monkeypatch, name, value):
    """With these options it would wait for another machine, or use a file of the current folder."""
    monkeypatch.setenv(name, value)
    assert name not in launch.build_environment(1)


def test_compiled_code_is_not_loaded_from_a_common_folder(monkeypatch, tmp_path):
    """In /tmp another user may have made the folder first."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    program = "import torch; torch.compile(lambda x: (x * 2 + 1).sin())(torch.ones(8))"
    subprocess.run([sys.executable, "-c", program], env=launch.build_environment(1), check=True)
    libraries = [
        str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.suffix in (".so", ".gch", ".h")
    ]
    assert libraries and all(file.startswith("home/.cache/pc-layer") for file in libraries), libraries


def test_compilation_needs_a_compiler_and_headers(machine, monkeypatch, tmp_path):
    config = Config(job={"dump_folder": str(tmp_path / "run")}, compile={"enable": True})
    machine(0)
    launch.build_command(config, 1)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(UserError, match=r"compile.enable = true needs .*on the PATH and .*/Python.h; install them"):
            launch.build_command(config, 1)
    monkeypatch.setattr(installed.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="compile.enable"):
        launch.build_command(config, 1)


def test_find_failure_reads_the_newest_attempt(tmp_path):
    def log(attempt, rank, text, age=0.0):
        file = tmp_path / "logs" / attempt / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        os.utime(file, (file.stat().st_mtime - age,) * 2)

    assert launch.find_failure(tmp_path) is None
    log("a", 0, "error: of yesterday\n", age=90000)
    lock(tmp_path).close()
    assert launch.find_failure(tmp_path) is None  # an attempt that has written nothing yet
    log("b", 0, "step 1\n")
    log("b", 1, "step 1\nTraceback (most recent call last):\n  File\nRuntimeError: no more\n")
    assert launch.find_failure(tmp_path).startswith("rank 1 ended with 'RuntimeError: no more'; its log is ")
    log("b", 2, "Traceback (most recent call last):\nUserError: x\nerror: x.y = 1 is wrong\nerror: z too\n")
    assert launch.find_failure(tmp_path) == "error: x.y = 1 is wrong\nerror: z too"


# the functions of the package that TorchTitan calls; like the real init, it takes the page from the environment
WANDB = """
import os
run, lines = None, []

def init(**given):
    global run
    run = (given["project"], given["name"], given["id"], os.environ["WANDB_RESUME"], given["config"]["optimizer"]["lr"])

def log(metrics, step):
    lines.append((step, metrics))
"""


def test_every_attempt_continues_one_page_of_weights_and_biases(tmp_path, monkeypatch):
    def start(run: str, lr: float = 1e-3) -> tuple:
        """The page that an attempt logs to."""
        config = Config(job={"dump_folder": run}, metrics={"enable_wandb": True}, optimizer={"lr": lr})
        _, environment = launch.build_command(config, 2)
        with mock.patch.dict(os.environ, environment):
            logger = WandBLogger(str(tmp_path), JobConfig(config))
        logger.log({"loss": 2.5}, 7)
        return sys.modules["wandb"].run

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(sys.modules):
        with monkeypatch.context() as patch:
            patch.setattr(installed, "find_spec", lambda name: None)
            with pytest.raises(UserError, match=r"enable_wandb = true needs the package: pip install wandb"):
                start("outputs/sweep/one")
        (tmp_path / "wandb.py").write_text(WANDB)
        *page, lr = start("outputs/sweep/one")
        assert page == ["pc-layer", "sweep/one", page[2], "allow"] and lr == 1e-3
        assert start("outputs/sweep/one", 2e-3) == (*page, 2e-3)
        lock(tmp_path / "outputs/sweep/one").close()  # a later attempt
        join_lock(tmp_path / "outputs/sweep/one").close()
        assert start("outputs/sweep/one") == (*page, 1e-3)
        assert start("two")[2] != page[2]
        shutil.rmtree(tmp_path / "outputs/sweep/one")  # it is trained from the start again
        assert start("outputs/sweep/one")[2] != page[2]
        page[2] = start("outputs/sweep/one")[2]
        monkeypatch.setenv("WANDB_PROJECT", "ours")
        assert start("outputs/sweep/one") == ("ours", *page[1:], 1e-3)
        assert sys.modules["wandb"].lines == 7 * [(7, {"loss": 2.5})]


SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGUSR2, {handler})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def signalled(tmp_path, monkeypatch):
    """signalled(a command's handler of SIGUSR2, what to do once it is ready, under_slurm): (its status, its output)"""

    def run(handler: str, send, under_slurm: bool = False) -> tuple[int, str]:
        monkeypatch.setattr(launch, "SECONDS_BETWEEN_PROGRESS_LINES", 0.1)
        said, before = tmp_path / "said", [signal.getsignal(number) for number in (*ENDS, signal.SIGQUIT)]
        held, sent = lock(tmp_path), []

        def meanwhile() -> None:
            held.close()
            assert is_locked(tmp_path)
            if said.read_text() == "ready\n" and not sent:
                sent.append(send())

        words = [sys.executable, "-c", SAVES.format(handler=handler)]
        with open(said, "w") as output:
            try:
                status = launch.run_command(words, dict(os.environ), [held], output, meanwhile, under_slurm=under_slurm)
            except SystemExit as end:
                status = end.code
        assert [signal.getsignal(number) for number in (*ENDS, signal.SIGQUIT)] == before and not is_locked(tmp_path)
        return status, said.read_text()

    return run


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _send(*numbers):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


@pytest.mark.parametrize(
    "number, under_slurm, status",
    [(signal.SIGUSR2, False, 7), (signal.SIGTERM, True, 7), *((number, False, 128 + number) for number in ENDS)],
)
def test_a_signal_asks_the_command_to_save(signalled, number, under_slurm, status):
    """The status after Ctrl-C ends a sweep; a SLURM task, which is signalled before a preemption, needs the run's status.
    The command holds the lock too, because a launcher that is killed alone leaves a trainer in the folder."""
    assert signalled("save", _send(number), under_slurm) == (status, "ready\nsaved\n")


@pytest.mark.parametrize("number", [*ENDS, signal.SIGQUIT])
def test_a_signal_that_was_ignored_stays_ignored(signalled, number):
    """As when a script's `command &` or nohup starts it: Ctrl-C in the terminal is not meant for it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert signalled("save", _send(number, signal.SIGUSR2)) == (7, "ready\nsaved\n")
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("asked", [False, True])
def test_a_signal_that_comes_twice_at_once_is_one(signalled, monkeypatch, asked):
    """`timeout` sends it to the process and to its group; another request to stop may precede it."""
    monkeypatch.setattr(launch, "SECONDS_OF_ONE_REQUEST", 0.3)

    def send() -> None:
        if asked:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.4)  # saving takes 0.5 s
        _send(signal.SIGTERM, signal.SIGTERM)()

    assert signalled("save", send) == (128 + signal.SIGTERM, "ready\nsaved\n")


def test_sigquit_ends_the_command_at_once(signalled):
    """Ctrl-\\ in a terminal; a command that outlives its launcher would keep the lock."""
    assert signalled("save", _send(signal.SIGQUIT)) == (128 + signal.SIGQUIT, "ready\n")


def test_a_second_signal_ends_the_command_at_once(signalled, capfd):
    def send() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(launch.SECONDS_OF_ONE_REQUEST + 0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    begin = time.monotonic()
    assert signalled("signal.SIG_IGN", send) == (128 + signal.SIGINT, "ready\n")
    assert time.monotonic() - begin < 30  # the command would sleep for 60
    assert capfd.readouterr().err == "SIGINT: saving and stopping after this step; another signal ends it at once\n"


def test_ctrl_c_before_the_training_has_no_traceback(capsys):
    @exit_on_user_error
    def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr() == ("", "")
