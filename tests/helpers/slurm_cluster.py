"""A real SLURM on this machine during a test: munge, a controller and two nodes on loopback."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
FOLDERS = ["/usr/sbin", "/usr/local/sbin"]  # Debian's folders of daemons, not on every user's PATH

CONFIG = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CryptoType=crypto/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MinJobAge=3600
KillWait=5
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10
"""


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start SLURM, or skip the test; yields the environment for sbatch and similar commands.

    SLURM_CONF is in the folder of the logs.

    The nodes are two slurmd on this machine, each with its own port. SLURM's usual proctrack/cgroup sends signals only to
    the tasks; it works for root with cgroups of version 1. linuxproc sends them to all processes.
    """
    path = os.pathsep.join([os.environ["PATH"], *FOLDERS])
    for program in PROGRAMS:
        if not shutil.which(program, path=path):
            pytest.skip(f"{program} is not installed; on Debian: apt-get install slurm-wlm munge")
    proctrack = "cgroup" if os.access("/sys/fs/cgroup/freezer", os.W_OK) and os.geteuid() == 0 else "linuxproc"
    # Not pytest's folder, because munge needs its socket where every user can reach it.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    host, cores = socket.gethostname().split(".")[0], len(os.sched_getaffinity(0))
    names = [f"{host}-0", f"{host}-1"]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs={cores} RealMemory=2000"
        for name in names
    ]
    user = getpass.getuser()
    config = CONFIG.format(
        folder=folder, host=host, user=user, port=_free_port(), proctrack=proctrack, nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(config)
    # "disabled" is unknown to some versions
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\nCgroupMountpoint=/sys/fs/cgroup\n"
    )
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))},
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": path,
    }

    def start(*command: str) -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    try:
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        start(
            "munged", *[f"--{option}={folder / name}" for option, name in files.items()], f"--seed-file={folder}/seed"
        )
        start("slurmctld", "-i")
        for name in names:
            start("slurmd", "-N", name)
        _wait_for(lambda: _output(environment, "sinfo", "-h", "-o", "%T %D") == "idle 2", 30)
        yield environment
    finally:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["scancel", f"--user={user}"], env=environment, timeout=30)
            with contextlib.suppress(AssertionError):
                _wait_for(lambda: not _output(environment, "squeue", "-h", "-t", "running,completing"), 20)
        for file in [*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munged.pid"]:
            if file.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


def _output(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout.strip()


def _wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "SLURM did not get there in time"
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
