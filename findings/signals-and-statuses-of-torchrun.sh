#!/usr/bin/env bash
# torch 2.13.0: torchrun hands SIGUSR2 to no rank, dies of it and leaves the ranks running; its own status is 1 whatever theirs is.
#
# One would guess: a signal for a job, such as the one that SLURM sends before the time limit, reaches the ranks, whose handler saves
# a checkpoint; and a rank's exit status comes through, as from mpirun or srun.
# What happens: SIGUSR1 and SIGUSR2 end torchrun at once, as they end any program without a handler. The ranks get neither
# signal nor end, and train on without it. When a rank exits with 42, torchrun exits with 1.
# Where it matters: sbatch --signal=USR2@120 with "srun torchrun", where SLURM tracks by control groups and signals the task alone:
# nothing is saved and the step is over. On a machine without SLURM the old ranks train on beside those of a second start.
# A status cannot tell a scheduler what to requeue.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-torch==2.13.0 numpy==2.3.5} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if sys.argv[1:] == ["rank"]:
    signal.signal(signal.SIGUSR2, lambda *_: Path(f"signal-{os.environ['RANK']}").touch())
    Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    while not Path("end").exists():
        Path(f"beat-{os.environ['RANK']}").write_text(str(time.monotonic()))
        time.sleep(0.1)
    sys.exit()
if sys.argv[1:] == ["status"]:
    sys.exit(42)

import torch

print("torch", torch.__version__)
command = ["bin/torchrun", "--standalone", "--nproc-per-node", "2", __file__]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
status = subprocess.run([*command, "status"], **quiet).returncode
print("ranks that exit with 42: torchrun exits with", status)
started = subprocess.Popen([*command, "rank"], **quiet)
while not all(Path(f"beat-{rank}").exists() for rank in (0, 1)):
    time.sleep(0.1)
started.send_signal(signal.SIGUSR2)
ended = started.wait(timeout=60)
time.sleep(3)
since = time.monotonic()
time.sleep(3)
beats = [float(Path(f"beat-{rank}").read_text()) > since for rank in (0, 1)]
handled = [Path(f"signal-{rank}").exists() for rank in (0, 1)]
print(f"after SIGUSR2 to torchrun: it ended by signal {-ended}; ranks run on {beats}, got the signal {handled}")
Path("end").touch()
time.sleep(1)
sys.exit(not (status == 1 and ended == -signal.SIGUSR2 and beats == [True, True] and handled == [False, False]))
EOF
bin/python observe.py || exit 1
