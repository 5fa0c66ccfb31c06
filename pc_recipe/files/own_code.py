"""Makes the processes that a command starts run this code."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_code() -> dict[str, str]:
    """Environment in which Python and its child processes import this code, and nothing from the current folder.

    `python -m` and `python -c` look there first, also when `multiprocessing` starts its servers: a `pip.py` or a
    `socket.py` in a data folder would be run.
    """
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # an empty entry means that folder too
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *others]))}
