"""Errors that end a command with one line on stderr, and the exit status of each."""


class UserError(ValueError):
    """Bad input: exit status 2. The message says what was received and what to do."""

    status = 2


class RunError(RuntimeError):
    """A run that cannot go on (a loss that is not finite, a lost rank): exit status 1."""

    status = 1
