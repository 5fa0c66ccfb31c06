"""Which code the processes run that a command starts."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_code() -> dict[str, str]:
    """Environment in which Python, and what that starts, runs this code and no file of the folder where it starts.

    `python -m` and `python -c` look there first, also where `multiprocessing` starts its servers: a `pip.py` or a
    `socket.py` that lies in a folder of data would be run.
    """
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # an empty one is that folder too
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *others]))}
