"""Errors of the file system that may pass: the same command may succeed later."""

from pc.errors import UserError


class WriteFailed(UserError):
    """It refused to write, perhaps because the disk is full."""


class ReadFailed(UserError):
    """It refused to read, again and again."""
