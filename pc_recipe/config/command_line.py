"""Command lines that take `--section.key=value`: their parser, and the help for the keys."""

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pc.errors import UserError
from pc_recipe.config.inheritance import load_config
from pc_recipe.config.schema import Config
from pc_recipe.config.sections import keys_of
from pc_recipe.files import look
from pc_recipe.files.errors import ReadFailed

EXAMPLES = """\
any key of a config can be set, such as
  --pc.level=3 --optimizer.lr=1e-3        two keys
  --pc.blocks=o,ffn --compile.enable      a list; a key without value is true
  --overlay FILE                          a TOML file laid over the config
  --help pc                               describes the keys with "pc" in their name; --help . describes all
"""


def parse_with_overrides(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """(arguments, overrides) of this process's command line.

    Args:
        parser: made with `add_help=False`; its argument "config" names the TOML file.
    """
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " [--section.key=value ...]\n"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{EXAMPLES}\nkeys by section:\n{list_keys()}"
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="WORD",
        action=_Help,
        help="this text, or the keys with WORD in their name",
    )
    return parser.parse_known_args()


def at_least_one(text: str) -> int:
    """An argparse `type` for counts."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} should be a whole number, 1 or more")
    return int(text)


def existing(text: str) -> Path:
    """An argparse `type` for an input path. It is checked before a script imports torch, which takes seconds."""
    try:
        if look.is_there(text):
            return Path(text)
    except ReadFailed as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    raise argparse.ArgumentTypeError(f"{text} does not exist")


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, word: Any, option: Any = None) -> None:
        if not word:
            parser.print_help()
        elif found := list(describe_keys(load_config(namespace.config) if namespace.config else Config(), word)):
            print("\n".join(found))
        else:
            raise UserError(f"no key has {word!r} in its name; --help without it lists all")
        parser.exit()


def list_keys() -> str:
    """The names of all keys, a paragraph per section."""
    by_section: dict[str, list[str]] = {}
    for name, *_ in keys_of(Config()):
        section, _, key = name.rpartition(".")
        by_section.setdefault(section, []).append(key)
    paragraphs = (f"{section}: {', '.join(keys)}" for section, keys in by_section.items())
    return "\n".join(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ") for text in paragraphs)


def describe_keys(config: Config, word: str) -> Iterator[str]:
    """Lines for each key whose name contains `word`: its value in `config`, its description and its choices."""
    for name, _, value, field in keys_of(config):
        if word in name:
            choices = _choices(field.annotation)
            more = f" One of {', '.join(choices)}." if choices else ""
            yield f"--{name}={_as_shown(value)}"
            yield textwrap.fill(f"{field.description}{more}", 110, initial_indent="    ", subsequent_indent="    ")


def as_toml(value: Any) -> str:
    """A value as TOML text: JSON's scalars and lists are valid TOML. A date, which no key takes, becomes a string."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {as_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _as_shown(value: Any) -> str:
    """A value as it is usually typed; "" for a key that is not set."""
    if value is None or isinstance(value, str):
        return value or ""
    return ",".join(map(str, value)) if isinstance(value, list) and value else as_toml(value)


def _choices(kind: Any) -> list[str]:
    """The values of the first `Literal` in a type."""
    if get_origin(kind) is Literal:
        return list(map(str, get_args(kind)))
    return next((found for inner in get_args(kind) if (found := _choices(inner))), [])
