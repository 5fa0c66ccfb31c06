"""Reads what runs, sweeps and scores have written about themselves. Someone else, or a fault, may have written it anew."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pc.errors import UserError
from pc_recipe.files import look

Tables = dict[str, dict[str, Any]]
"""The form of a run's config.toml."""


class Malformed(UserError):
    """A record is damaged, or of another form. A reader that can do without it catches this."""


_adapter = cache(TypeAdapter)


def read(file: Path, form: Any) -> Any:
    """What a .json or a .toml file holds, or a list of what the lines of a .jsonl file do; None if there is no file.

    Args:
        form: the type of what it holds, as pydantic takes it.

    Raises:
        Malformed: in one line, which names the file.
        ReadFailed: the file system refuses to read.
        UserError: it is a folder or a pipe.
    """
    content = look.read(file)
    return None if content is None else parse(content, file, form)


def parse(content: bytes, file: Path, form: Any) -> Any:
    """What `read` returns of a file with this content."""
    adapter = _adapter(form)
    try:
        if file.suffix == ".toml":
            return adapter.validate_python(tomllib.loads(content.decode()))
        if file.suffix == ".jsonl":
            return [adapter.validate_json(line) for line in content.splitlines() if line.strip()]
        return adapter.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise Malformed(f"{file}: damaged, or of another form ({' '.join(reason.split())[:200]})")
