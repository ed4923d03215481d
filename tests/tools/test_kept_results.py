"""Results of compilations are stored, read again, and ignored if anything has changed or is corrupt."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource

from tpfuse.tools import compilation, kept_results
from tpfuse.tools.compilation import compile_here
from tpfuse.tools.kept_results import KeptResults, digest
from tpfuse.tools.recorded import Job, Recorded
from tpfuse.tools.resources import Compilation

KERNEL = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)

@triton.jit
def scaled(x):
    return x * FACTOR

@triton.jit
def toy_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, scaled(tl.load(x_ptr + offs)))
"""

FAILING = {16: "out of memory"}  # number of warps -> the compiler's error


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
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """Return the list of the jobs that have been compiled, by a fake compiler."""
    seen: list[Job] = []

    def compile_jobs(jobs: Sequence[Job], keep: Path | None = None) -> Iterator[tuple[int, Compilation]]:
        for index, job in enumerate(jobs):
            seen.append(job)
            fields = {**compilation._identity(job), "error": FAILING.get(job.num_warps, "")}
            yield index, Compilation(**fields, registers=33, loads={16: len(seen)})

    monkeypatch.setattr(compilation, "compile_jobs", compile_jobs)
    yield seen


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, *jobs: Job) -> list[Compilation]:
    monkeypatch.setattr(compilation, "record", lambda *asked: Recorded(list(jobs), [], []))
    return compile_here([], [], [], kept_results=folder).compilations


def test_a_second_run_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Job]) -> None:
    job, kept = _job(tmp_path), tmp_path / "kept"
    first = _run(monkeypatch, kept, job, replace(job, num_warps=8))
    assert len(compiled) == 2
    assert _run(monkeypatch, kept, job, replace(job, num_warps=8)) == first
    assert len(compiled) == 2
    (elsewhere,) = _run(monkeypatch, kept, replace(job, operator="other", dtype="float16"))
    assert len(compiled) == 2 and (elsewhere.operator, elsewhere.dtype) == ("other", "float16")
    assert not [path for path in kept.iterdir() if path.name.startswith(".")], "a write has left its file"


def test_processes_that_compile_at_the_same_time_share_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Job]
) -> None:
    jobs, kept = [replace(_job(tmp_path), num_warps=n) for n in (1, 2, 4, 8)], tmp_path / "kept"
    others: list[list[Compilation]] = []

    def meanwhile(result: Compilation) -> None:
        if not others:
            others.append(_run(monkeypatch, kept, *jobs))

    monkeypatch.setattr(compilation, "record", lambda *asked: Recorded(jobs, [], []))
    assert compile_here([], [], [], on_done=meanwhile, kept_results=kept).compilations == others[0]
    assert len(compiled) == len(jobs)


@pytest.mark.parametrize(
    "change",
    [
        {"text": KERNEL.replace("return x * FACTOR", "return x + FACTOR")},
        {"text": KERNEL.replace("constexpr(3)", "constexpr(4)")},
        {"text": KERNEL.replace("BLOCK)\n    tl.store", "BLOCK)\n    tl.debug_barrier()\n    tl.store")},
        {"block": 128},
        {"family": "sm_80"},
        {"num_warps": 8},
    ],
    ids=["a called function", "a global that it uses", "the kernel", "a constant", "the family", "an option"],
)
def test_a_changed_kernel_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Job], change: dict[str, Any]
) -> None:
    kept = tmp_path / "kept"
    for jobs in (_job(tmp_path), _job(tmp_path), _job(tmp_path, **change)):
        _run(monkeypatch, kept, jobs)
    assert len(compiled) == 2


def test_another_compiler_has_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(tmp_path)
    names = {digest(job)}
    monkeypatch.setattr(triton.backends.nvidia.compiler.CUDABackend, "hash", lambda backend: "another ptxas")
    names.add(digest(job))
    monkeypatch.setattr(kept_results, "_reader", lambda: "figures are read in another way")
    names.add(digest(job))
    assert len(names) == 3


@pytest.mark.parametrize("harm", ["empty", "truncated", "changed", "no text"])
def test_an_entry_that_is_corrupt_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Job], harm: str
) -> None:
    job, kept = _job(tmp_path), tmp_path / "kept"
    _run(monkeypatch, kept, job)
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    harmed = {"empty": b"", "truncated": whole[:-9], "changed": whole.replace(b"33", b"34"), "no text": b"\xff\x00"}
    path.write_bytes(harmed[harm])
    assert _run(monkeypatch, kept, job)[0].registers == 33
    assert len(compiled) == 2
    _run(monkeypatch, kept, job)
    assert len(compiled) == 2, "the new entry is whole"


def test_failures_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Job]) -> None:
    for count in (1, 2):
        assert _run(monkeypatch, tmp_path / "kept", _job(tmp_path, num_warps=16))[0].error == "out of memory"
        assert len(compiled) == count


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptResults(tmp_path / "file")
    kept.write("name", Compilation("toy", "sm_90", "float32", "toy_kernel", {}, 4, 2))
    assert kept.read("name") is None
