"""Programs that stand in for nsys and ncu: they keep the words that they get, and print what a test tells them to."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

StandIn = Callable[..., Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a function that puts a program on PATH, before all others.

    It prints the value of `says` whose key is among its words, and ends with `status`. Its words of each call are a
    line of the file NAME.words beside it.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, says: dict[str, str], *, status: int = 0, errors: str = "") -> Path:
        cases = "\n".join(f"*' {word} '*) printf %s {shlex.quote(text)} ;;" for word, text in says.items())
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "$*" >> "$0.words"\nprintf %s {shlex.quote(errors)} >&2\n'
            f'case " $* " in\n{cases}\nesac\nexit {status}\n'
        )
        program.chmod(0o755)
        return program

    return make
