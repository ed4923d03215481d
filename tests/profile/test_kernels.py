"""The table of kernels that wait, beside what Triton's functions call and what the programs of one rank launch."""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

from tpfuse.kernels import signals
from tpfuse.profile.kernels import PROGRAMS, kernels
from tpfuse.tools import one_rank, rank_programs
from tpfuse.tools.rank_programs import TINY

FOLDER = Path(str(signals.__file__)).parent


def _compiled(value: Any) -> FunctionType | None:
    """Return the Python function of a function that Triton compiles."""
    return value.fn if isinstance(value, JITFunction | InterpretedFunction) else None


def _functions() -> Iterator[FunctionType]:
    for file in sorted(FOLDER.glob("*.py")):
        module = importlib.import_module(f"tpfuse.kernels.{file.stem}")
        yield from (function for value in vars(module).values() if (function := _compiled(value)) is not None)


def _called(function: FunctionType, found: set[FunctionType]) -> set[FunctionType]:
    """Return `found` with a function and those that it calls, by the names that Python resolves in them."""
    found.add(function)
    for name in function.__code__.co_names:
        called = _compiled(function.__globals__.get(name))
        if called is not None and called not in found:
            _called(called, found)
    return found


def test_kernels_that_wait_are_those_whose_functions_call_a_wait() -> None:
    wait = _compiled(signals.wait_signal)
    assert wait is not None
    expected = {f.__name__: wait in _called(f, set()) for f in _functions() if f.__name__.endswith("_kernel")}
    assert kernels() == expected
    assert {False, True} == set(expected.values())
    assert expected["gemm_reduce_scatter_forward_kernel"] and not expected["ring_attention_dkdv_kernel"]


def test_only_wait_signal_reads_a_word_until_it_changes() -> None:
    """The loops with atomic operations in them, in what Triton compiles."""
    loops = {
        node.name
        for file in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        for loop in ast.walk(node)
        if isinstance(loop, ast.While) and "tl.atomic" in ast.unparse(loop)
    }
    assert loops == {"wait_signal"}


def test_programs_of_one_rank_launch_the_kernels_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, set[str]] = {name: set() for name in rank_programs.PROGRAMS}
    current = ""
    real = InterpretedFunction.__getitem__

    def counted(function: Any, grid: Any) -> Any:
        launched[current].add(function.fn.__name__)
        return real(function, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", counted)
    monkeypatch.setattr(rank_programs, "VARIANTS", 1)
    for current in rank_programs.PROGRAMS:
        if current != "ring_attention, from owners":  # the same kernels as ring_attention, and the slowest program
            one_rank.profile(current, 2, 1, replace(TINY, elements=1001), torch.device("cpu"), timeout=120.0)
    reached = set().union(*launched.values())
    assert {name for name, program in PROGRAMS.items() if program is not None} == PROGRAMS.keys() & reached
    assert not [name for name, program in PROGRAMS.items() if program is not None and name not in launched[program]]
