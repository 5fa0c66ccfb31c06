"""What a user who made a mistake is told: one or two lines, no traceback."""

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec


class UserError(ValueError):
    """Something the user can fix. The message names the key or file and says what would be right."""


class MissingExtra(UserError, ImportError):
    """A part of the project was imported whose dependencies are not installed."""


def require_extra(extra: str, *modules: str) -> None:
    """For a package's `__init__`: say which extra installs what it needs.

    Raises:
        MissingExtra: one of `modules` cannot be imported.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtra(f"{module} is not installed; pip install 'pc-layer[{extra}]'")


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command's `main`: a `UserError` becomes `error: ...` on stderr and exit status 2.

    Any other exception keeps its traceback, because it is a bug of ours.
    """

    @functools.wraps(main)
    def guarded(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return guarded
