"""Errors that the user can fix."""


class UserError(ValueError):
    """The message is one or two lines that name the key or file and say what would be valid."""

    may_pass = False
    """Whether the same call may succeed later, as when a disk is full: then it is no mistake of the user."""
