"""File-system errors that may pass: the command may succeed later, so its exit status is not that of a mistake."""

from pc.errors import UserError


class DiskFailed(UserError):
    """The file system refused."""

    may_pass = True


class WriteFailed(DiskFailed):
    """Writing failed, perhaps because the disk is full."""


class ReadFailed(DiskFailed):
    """Reading failed, also after retries where they may help."""
