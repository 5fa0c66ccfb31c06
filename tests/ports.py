"""Where a command and all processes that it starts listen, and which other machines they talk to, while it runs.

    python tests/ports.py ./run_llama_train.sh train_configs/debug.toml

An inherited environment variable marks these processes, also through SLURM (`--sbatch=--wait` makes `submit.py` wait for
the job).
Sockets are looked at five times a second, so one that is open for less time may be missed.
"""

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

MARK = "PC_PORTS_OF"
SECONDS = 0.2


def watch(words: Sequence[str]) -> tuple[int, dict[str, set[str]]]:
    """Run a command to its end: its status, and {"listens" or "talks to": addresses, each with the program}."""
    mark = secrets.token_hex(8)
    command = subprocess.Popen(words, env=os.environ | {MARK: mark})
    known: dict[int, str | None] = {}
    """{process: its program, if it is one of the command's}"""
    found: dict[str, set[str]] = {"listens": set(), "talks to": set()}
    while command.poll() is None:
        time.sleep(SECONDS)
        for socket in psutil.net_connections("inet"):
            if socket.pid is None:
                continue
            if socket.pid not in known:
                known[socket.pid] = program_of(socket.pid, mark)
            if program := known[socket.pid]:
                if socket.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    found["listens"].add(f"{socket.laddr.ip} {program}")
                elif socket.raddr and not socket.raddr.ip.startswith(("127.", "::1", "::ffff:127.")):
                    found["talks to"].add(f"{socket.raddr.ip} {program}")
    return command.returncode, found


def program_of(process: int, mark: str) -> str | None:
    """The module or script that a process runs, if it is marked."""
    with contextlib.suppress(psutil.Error):
        if psutil.Process(process).environ().get(MARK) == mark:
            words = psutil.Process(process).cmdline()[1:]
            names = [] if "-c" in words else [word for word in words if not word.startswith("-")]
            return os.path.basename(names[0]) if names else "python"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", help="a program and its words")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    status, found = watch([arguments.command, *arguments.words])
    for what, addresses in found.items():
        print(f"{what}: {', '.join(sorted(addresses)) or 'nowhere'}")
    sys.exit(status)


if __name__ == "__main__":
    main()
