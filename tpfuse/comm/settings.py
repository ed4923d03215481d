"""The settings of every wait between ranks: one set for the whole process, made before the first collective."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# The first wait of each operation on GPUs, and for each new buffer, may take this many times as long: some ranks find
# their kernels in Triton's cache, and others compile them.
FIRST_WAIT = 3.0


@dataclass(frozen=True)
class Settings:
    """The settings of this process.

    timeout: the seconds that a wait for another rank may take (on GPUs see `FIRST_WAIT`); fingerprint: whether ranks
    compare operation, shapes and dtypes before each operation (slow; it finds ranks that disagree); flight_folder: the
    folder into which the last operations of every rank are written, as JSON, when a wait expires (None: they are not
    written).
    """

    timeout: float = 60.0
    fingerprint: bool = False
    flight_folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout}: expected a number of seconds above 0")


_settings = Settings()


def settings() -> Settings:
    """Return the settings in force."""
    return _settings


def set_settings(**changes: Any) -> None:
    """Change some of the settings, for memories that are connected from now on. Raise ValueError for a bad value."""
    global _settings
    _settings = replace(_settings, **changes)
