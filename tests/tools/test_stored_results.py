"""Results of compilations are stored in Triton's cache, read again, and missing if anything has changed."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource

from tpfuse.tools import compilation
from tpfuse.tools.compilation import compile_here
from tpfuse.tools.recorded import Job, Recorded
from tpfuse.tools.resources import Compilation

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scaled(x):
    return x * 3

@triton.jit
def toy_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, scaled(tl.load(x_ptr + offs)))
"""


def _job(folder: Path, text: str = KERNEL, block: int = 64, family: str = "sm_90", num_warps: int = 4) -> Job:
    """Return a launch of the kernel in `text`, which is not interpreted."""
    path = folder / "toy.py"
    path.write_text(text)
    specification = importlib.util.spec_from_file_location("toy", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        specification.loader.exec_module(module)
    source = ASTSource(module.toy_kernel, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {(1,): block}, {})
    return Job("toy", family, "float32", source, num_warps, 2)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a file with a line for each job that a fake compiler has compiled; it fails with 16 warps."""
    seen = tmp_path / "compiled"
    seen.touch()

    def fake(job: Job) -> None:
        with seen.open("a") as file:
            file.write(f"{job.num_warps}\n")
        if job.num_warps == 16:
            raise MemoryError("out of memory")

    monkeypatch.setattr(compilation, "compiled", fake)
    figures: dict[str, Any] = {"registers": 33, "loads": {16: 1}}
    monkeypatch.setattr(
        compilation.resources, "examine", lambda kernel, identity, log: Compilation(**identity, **figures)
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        yield seen


def _run(monkeypatch: pytest.MonkeyPatch, *jobs: Job, **options: Any) -> list[Compilation]:
    monkeypatch.setattr(compilation, "record", lambda *asked: Recorded(list(jobs), [], []))
    return compile_here([], [], [], **options).compilations


def _count(compiled: Path) -> int:
    return len(compiled.read_text().splitlines())


def test_a_second_run_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    job = _job(tmp_path)
    first = _run(monkeypatch, job, replace(job, num_warps=8))
    assert [(result.num_warps, result.loads) for result in first] == [(4, {16: 1}), (8, {16: 1})]
    assert _run(monkeypatch, job, replace(job, num_warps=8)) == first
    (elsewhere,) = _run(monkeypatch, replace(job, operator="other", dtype="float16"))
    assert (elsewhere.operator, elsewhere.dtype, elsewhere.registers) == ("other", "float16", 33)
    assert _count(compiled) == 2
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    _run(monkeypatch, job)
    assert _count(compiled) == 3


def test_processes_that_compile_at_the_same_time_share_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    jobs = [replace(_job(tmp_path), num_warps=n) for n in (1, 2, 4, 8)]
    others: list[list[Compilation]] = []

    def meanwhile(result: Compilation) -> None:
        if not others:
            others.append(_run(monkeypatch, *jobs))

    assert _run(monkeypatch, *jobs, on_done=meanwhile) == others[0]
    assert _count(compiled) == len(jobs)


@pytest.mark.parametrize(
    "change",
    [{"text": KERNEL.replace("x * 3", "x + 3")}, {"block": 128}, {"family": "sm_80"}, {"num_warps": 8}],
    ids=["a called function", "a constant", "the family", "an option"],
)
def test_what_has_changed_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path, change: dict[str, Any]
) -> None:
    for job in (_job(tmp_path), _job(tmp_path), _job(tmp_path, **change)):
        _run(monkeypatch, job)
    assert _count(compiled) == 2
    monkeypatch.setattr(compilation, "_reader", lambda: "figures are read in another way")
    _run(monkeypatch, job)
    assert _count(compiled) == 3


def test_failures_and_kernels_that_were_not_examined_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
) -> None:
    job = _job(tmp_path)
    for count in (1, 2):
        assert _run(monkeypatch, replace(job, num_warps=16))[0].error == "out of memory"
        assert _run(monkeypatch, job, examined=False)[0].registers == 0
        assert _count(compiled) == 2 * count
