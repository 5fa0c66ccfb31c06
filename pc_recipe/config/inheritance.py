"""Reads a chain of TOML files: `parent = "base.toml"` at the top of a file names the file that it overrides.

Precedence: command line > the file > its parent > the parent's parent > the schema's defaults. Sections merge key by
key; a value replaces its parent's. Lists and tables such as `pc.level` are values. `--overlay FILE` on the command line
stands for all that the file and its parents set; later arguments override it.
"""

import contextlib
import difflib
import hashlib
import os
import re
import reprlib
import tomllib
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pc.command import plain
from pc.errors import UserError
from pc_recipe.config.schema import GONE, HOLDS, INSTEAD, Config
from pc_recipe.config.sections import Section, keys_of
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.places import CONFIG

OVERLAY = "overlay"
RESOLVED = "# Resolved configuration. Sources, highest precedence first:\n"
Schema = TypeVar("Schema", bound=Section)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, with `job.dump_folder` filled in: outputs/<name of the file> if nothing sets it.

    Args:
        path: the TOML file of the run.
        overrides: arguments of a command line, `--section.key value`, `--section.key=value` or `--overlay FILE`.

    Raises:
        UserError: a line for each wrong key of the first faulty file, or for the first wrong override.
    """
    config = resolve(path, overrides, Config)
    folder = config.job.dump_folder or str(Path("outputs") / Path(path).stem)
    config = _overlaid(config, validated({"job": {"dump_folder": folder}}, Config, f"name of {path}"))
    config._origin = _origin(Path(path), overrides)
    return config


def read_config(run: Path) -> Config | None:
    """The configuration in a run's folder; None if there is none that this version can read."""
    try:
        return load_config(run / CONFIG)
    except UserError:
        return None


def read_earlier(run: Path) -> Config | None:
    """The configuration of what a run has trained so far; None if its folder has none.

    Raises:
        UserError: this version cannot read it, so it cannot say what going on would change.
    """
    file = run / CONFIG
    return load_config(file) if look.is_there(file) else None


def write_config(config: Config, destination: str | Path) -> None:
    """Write the keys that are set as one TOML file that resolves to `config`, with its origin in comments."""
    write_atomically(destination, f"{config._origin}\n{tomli_w.dumps(config.model_dump(exclude_unset=True))}")


def resolve(path: str | Path, overrides: Sequence[str], schema: type[Schema]) -> Schema:
    """An instance of any schema from a file, its ancestors and `overrides`; `model_fields_set` says what was set."""
    return reduce(_overlaid, [*_files(Path(path), schema), *_words(overrides, schema)], schema())


def validated(
    values: dict[str, Any],
    schema: type[Schema],
    where: str,
    *,
    strict: bool = True,
    extra: Literal["forbid", "ignore"] = "forbid",
) -> Schema:
    """Raises a `UserError` with a line for each wrong key; `extra="ignore"` leaves out keys of another version."""
    try:
        return schema.model_validate(values, strict=strict, extra=extra)
    except ValidationError as error:
        lines = [f"{where}: {_said(finding, schema)}" for finding in error.errors(include_url=False)]
        raise UserError("\nerror: ".join(lines)) from None


def _files(path: Path, schema: type[Schema]) -> list[Schema]:
    """What a file and its ancestors set, the file's own last."""
    return [validated(values, schema, str(file)) for file, _, values in _chain(path)][::-1]


def _chain(path: Path) -> Iterator[tuple[Path, bytes, dict[str, Any]]]:
    """(file, content, values) of a file and its ancestors."""
    seen: list[str] = []
    child = ""
    while True:
        seen.append(os.path.abspath(path))
        if seen.count(seen[-1]) > 1:
            raise UserError(f"{path}{child}: parents form a cycle: {' -> '.join(map(os.path.basename, seen))}")
        if (content := look.read(path)) is None:
            raise UserError(f"{path}{child}: No such file")
        try:
            values = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
        except (ValueError, RecursionError) as error:  # wrong syntax, encoding, too many digits or levels
            raise UserError(f"{path}{child}: not valid TOML: {error}") from None
        parent = values.pop("parent", None)
        is_resolved = content.startswith(RESOLVED.encode())
        if is_resolved:  # of a run, perhaps of an earlier version
            _drop_gone(values, path)
        if is_resolved and path.name == CONFIG:  # the run's folder may have moved
            job = values.setdefault("job", {})
            if isinstance(job, dict) and os.path.realpath(str(job.get("dump_folder"))) != os.path.realpath(path.parent):
                job["dump_folder"] = str(path.parent)
        yield path, content, values
        if parent is None:
            return
        child, path = f" (parent of {path})", path.parent / str(parent)


def _drop_gone(values: dict[str, Any], path: Path) -> None:
    """Remove the keys of earlier versions from what a run has written, if what they say holds without them too."""
    for name, instead in GONE.items():
        section, _, key = name.partition(".")
        table = values.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        value = table.pop(key)
        if value != HOLDS.get(name, value):
            raise UserError(
                f"{path}: {name} = {value!r} is of an earlier version, and the run goes on only with that version: {instead}"
            )


def _words(words: Sequence[str], schema: type[Schema]) -> Iterator[Schema]:
    """What each override of a command line sets. `--a.b` alone means true."""
    for name, text in _pairs(words):
        if name == OVERLAY:
            if not text:
                raise UserError("command line: --overlay needs a TOML file")
            yield from _files(Path(text), schema)
        else:
            name = name.replace("-", "_")
            yield _set(name.split("."), text, schema)
            for key in (key for key, *_ in keys_of(schema()) if name.startswith(f"{key}.")):  # entries do not merge
                entry = name.removeprefix(f"{key}.")
                raise UserError(f"command line: give --{key} with all of its entries: --{key} '{{{entry} = ...}}'")


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value) of each override; the value is None if none is given."""
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"command line: {word!r} is not an override; write --section.key value")
        name, has_value, text = word[2:].partition("=")
        is_alone = not has_value and (not words or words[0].startswith("--"))
        yield name, None if is_alone else text if has_value else words.pop(0)


def _set(keys: Sequence[str], text: str | None, schema: type[Schema]) -> Schema:
    """An instance in which one key has a value from the command line, read as TOML or else as text, such as `x,y`."""

    def read(value: Any, strict: bool = True) -> Schema:
        nested = reduce(lambda inner, key: {key: inner}, reversed(keys), value)
        return validated(nested, schema, "command line", strict=strict)

    if text is None:
        return read(True)
    # a TOML value, a list without its brackets, or plain text
    for written in (text, f"[{text}]") if "," in text else (text,):
        with contextlib.suppress(ValueError, RecursionError):
            value = tomllib.loads(f"value = {written}")["value"]
            break
    else:
        return read(text, strict=False)
    try:
        return read(value)
    except UserError:
        if not text.startswith(("[", "{")):
            with contextlib.suppress(UserError):
                return read(text, strict=False)
        raise


def _overlaid(below: Schema, above: Schema) -> Schema:
    """`below`, with what is set in `above`."""
    values = {name: getattr(above, name) for name in above.model_fields_set}
    sections = {name: _overlaid(getattr(below, name), v) for name, v in values.items() if isinstance(v, Section)}
    return below.model_copy(update=values | sections)


def _origin(path: Path, overrides: Sequence[str]) -> str:
    """Comments for `write_config`; a file that it wrote keeps its own."""
    files = list(_chain(path))
    text = files[0][1].decode()
    if text.startswith(RESOLVED) and not overrides:
        return "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    lines = [f"command line: {' '.join(overrides)}"] if overrides else []
    for overlay in [Path(text) for name, text in _pairs(overrides) if name == OVERLAY and text]:
        files = [*_chain(overlay), *files]
    lines += [f"{file}  sha256 {hashlib.sha256(content).hexdigest()}" for file, content, _ in files]
    # a line break in a name or an override would end the comment; TOML forbids other control characters in it
    return RESOLVED + "".join(f"#   {plain(' '.join(line.splitlines()))}\n" for line in lines)


def _said(finding: ErrorDetails, schema: type[Section]) -> str:
    name = ".".join(map(str, finding["loc"]))
    if finding["type"] == "extra_forbidden":
        return _unknown(name, schema)
    said = re.sub(r"^(Input|String|List|Value error,) should | or instance of .*", "", finding["msg"])
    return f"{name} = {reprlib.repr(finding['input'])} should {said}"


def _unknown(name: str, schema: type[Section]) -> str:
    if name in INSTEAD:
        return f"{name} is not supported by this trainer; see {INSTEAD[name]}"
    if name in GONE:
        return f"{name} is no key any more; leave it out: {GONE[name]}"
    known = [key for key, *_ in keys_of(schema())]
    if name in known:  # but in quotes
        return f"{name}: write it without quotes, or below [{name.rpartition('.')[0]}]"
    elsewhere = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    names = [*known, *(key.rpartition(".")[0] for key in known)]
    section, _, key = name.rpartition(".")
    # such as "learning_rate" for `optimizer.lr`, whose description contains both words
    meant = [
        other
        for other, _, _, field in keys_of(schema())
        if "_" in key
        and other.startswith(f"{section}.")
        and all(word in (field.description or "").lower() for word in key.split("_"))
    ]
    typed = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    if candidates := elsewhere or typed or meant[:1] or difflib.get_close_matches(name, names, n=1):
        return f"unknown key {name}; did you mean {' or '.join(candidates[:3])}?"
    return f"unknown key {name}; this kind of file has {', '.join(schema.model_fields)}"
