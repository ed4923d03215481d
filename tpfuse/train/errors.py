"""Errors that end a command with one line on stderr, and the exit status of each."""


class UserError(ValueError):
    """Bad input: exit status 2. The message says what was received and what to do."""

    status = 2


def of_disk(error: OSError) -> str:
    """What the system says, with the file's name where it knows it."""
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename else said


class RunError(RuntimeError):
    """A run that cannot go on (a loss that is not finite, a lost rank): exit status 1, 3 for a damaged checkpoint."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
