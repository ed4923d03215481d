"""Sites: the source lines of an operation, with the rank and the program that performs it."""

import contextlib
import linecache
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
import triton

from tpfuse.explore.clocks import Line

_FOREIGN = (
    *(f"{Path(str(file)).parent}{os.sep}" for file in (triton.__file__, torch.__file__, __file__)),
    *(str(module.__file__) for module in (threading, contextlib)),
)


@dataclass(frozen=True)
class Site:
    """An operation of one thread of control. lines: the innermost first, then its callers in the kernel or the rank.

    stream: its number; 0 for the default stream of the rank.
    """

    operation: str
    rank: int
    program: tuple[int, ...] | None
    lines: tuple[Line, ...]
    stream: int = 0

    def __str__(self) -> str:
        callers = "".join(f"\n      called from {text_of(line)}" for line in self.lines[1:])
        on = f" on stream {self.stream}" if self.stream else ""
        return f"{self.operation}{on} by {actor(self.rank, self.program)} at {text_of(self.lines[0])}{callers}"


def actor(rank: int, program: tuple[int, ...] | None) -> str:
    """Return the description of a rank, or of a program of its grid."""
    if program is None:
        return f"rank {rank}"
    last = max((axis for axis, index in enumerate(program) if index), default=0)
    number = program[0] if last == 0 else program[: last + 1]
    return f"rank {rank}, program {number}"


def text_of(line: Line) -> str:
    """Return "file:line: text"; the file is relative to the working directory if it is inside."""
    path = Path(line[0])
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    text = linecache.getline(*line).strip()
    return f"{path}:{line[1]}" + (f": {text}" if text else "")


def is_foreign(file: str) -> bool:
    """Return whether the file belongs to torch, Triton or the explorer."""
    return file.startswith(_FOREIGN)


def lines_here(roots: frozenset[CodeType]) -> tuple[Line, ...]:
    """Return at most three lines on the stack, not of torch, Triton or the explorer, up to a frame of a root.

    roots: the code of the functions at which the search ends.
    """
    frame: FrameType | None = sys._getframe(1)
    lines: list[Line] = []
    while frame is not None and frame.f_code not in roots:
        line = frame.f_code.co_filename, frame.f_lineno
        if not is_foreign(line[0]) and line not in lines[-1:]:
            lines.append(line)
        frame = frame.f_back
    return tuple(lines[:3]) or (("?", 0),)
