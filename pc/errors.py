"""The error that the user can fix."""


class UserError(ValueError):
    """The message is one line that names the key or file and says what would be valid."""
