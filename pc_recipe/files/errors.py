"""Errors of the file system that may pass: the same command may succeed later, so its status is not a mistake's."""

from pc.errors import UserError


class DiskFailed(UserError):
    """It refused."""

    kind, status = "failed", 1


class WriteFailed(DiskFailed):
    """It refused to write, perhaps because the disk is full."""


class ReadFailed(DiskFailed):
    """It refused to read, again and again."""
