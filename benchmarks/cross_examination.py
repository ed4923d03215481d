"""Examine tpfuse's kernels and faults by other checkers that need no GPU; docs/cross_examination.md has the results.

    python -m benchmarks.cross_examination tests kernels mutants dialect --tools DIR --family sm_80

SentryWard, in DIR/sentryward, examines the PTX of tests/explore/test_ptx*.py (tests), the kernels that the cases of
`tpfuse verify` launch (kernels), and kernels with a line deleted or weakened (mutants). The race detector of
triton-viz, in DIR/triton-viz, examines the kernels in Triton's dialect for GPUs (dialect).
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton._C.libtriton import ir
from triton.compiler import make_backend

from tpfuse.explore.ptx import Kernel, PtxError
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.tools import emulated, operators, recorded, verify

TESTS = Path(__file__).resolve().parents[1] / "tests"
WORDS = {"race_free": "race-free", "potential_race": "found", "not_wellsynced": "found"}
WORDS |= {"timeout": "undecided", "analysis_budget_exceeded": "undecided"}
MUTATED = ("attention_backward_dkdv_kernel",)  # of attention's first case
MOST = 3  # mutants of a kind


class ExaminedLaunch:
    """A launch of a kernel. fault: what tpfuse finds. equal: pairs of threads that store the same at one place."""

    def __init__(self, case: str, kernel: Kernel, grid: tuple[int, ...], arguments: list[Any]) -> None:
        self.case, self.kernel, self.grid, self.arguments = case, kernel, (*grid, 1, 1)[:3], arguments
        self.before, self.fault, self.equal = self.tensors(), "", 0

    def tensors(self) -> list[torch.Tensor]:
        return [x.detach().clone() for x in self.arguments if isinstance(x, torch.Tensor)]

    def scalars(self) -> list[dict[str, Any]]:
        """Return the arguments that are no tensors as SentryWard reads them."""
        named = zip(self.kernel.parsed.parameters, self.arguments, strict=True)
        given = [(*parameter, x) for parameter, x in named if not isinstance(x, torch.Tensor)]
        null = {"type": "pointer", "value": None}
        value = lambda kind, x: x % 2 ** int(kind[1:]) if kind[0] == "u" else x  # noqa: E731
        return [
            {"parameter": name} | (null if x is None else {"type": kind, "value": value(kind, x)})
            for name, kind, x in given
        ]


class LaunchRecorder:
    """The launches of kernels, one for each text; a plugin of pytest, which tells it the names of tests."""

    def __init__(self) -> None:
        self.launches: dict[str, ExaminedLaunch] = {}
        self.case, self._equal = "", 0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.case = item.name

    @contextmanager
    def recording(self) -> Iterator[None]:
        run, store = Kernel.run, CheckedSharedMemory.store

        def noting(kernel: Kernel, grid: Any, arguments: Any, **options: Any) -> None:
            launch, self._equal = ExaminedLaunch(self.case, kernel, tuple(grid), list(arguments)), 0
            self.launches.setdefault(kernel.text, launch)
            try:
                run(kernel, grid, arguments, **options)
            except PtxError as error:
                launch.fault = type(error).__name__
                raise
            finally:
                launch.equal, launch.after = self._equal, launch.tensors()

        def counting(memory: Any, addresses: Any, warps: Any, values: Any) -> None:
            counts = np.unique(addresses, return_counts=True)[1]
            self._equal += int((counts * (counts - 1) // 2).sum())
            store(memory, addresses, warps, values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Kernel, "run", noting)
            patch.setattr(CheckedSharedMemory, "store", counting)
            yield


def examined(launch: ExaminedLaunch, limit: int, text: str = "") -> tuple[str, str, int]:
    """Return SentryWard's result for a launch, its first reason, and how many pairs of accesses it calls unordered.

    text: another PTX for the launch, of which the first such pair is enough.
    """
    shape = {"grid_dim": launch.grid, "block_dim": [launch.kernel.parsed.threads, 1, 1]}
    shape |= {"dynamic_shared_bytes": launch.kernel.shared}
    given = {"schema": "spverify.kernel-input/v1", "launch": shape, "arguments": launch.scalars()}
    with tempfile.TemporaryDirectory() as folder:
        ptx, configuration = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        pointers = r"\.param \.u64 (array\d+)", r".param .u64 .ptr .global .align 16 \1"
        ptx.write_text(re.sub(*pointers, text or launch.kernel.text))
        configuration.write_text(json.dumps(given))
        options = {"exhaustive_memory_search": not text, "pipeline_timeout_seconds": limit, "rss_limit_mib": 6000}
        found = import_module("sentryward.frontend.ptx_native").run_ptx(ptx, configuration, **options)
    reasons = [x["code"] for x in found["diagnostics"]]
    return found["result"], (reasons or [""])[0], found.get("race_count") or 0


def launched(family: str, cases: list[tuple[str, str]]) -> list[ExaminedLaunch]:
    recorder = LaunchRecorder()
    for operator, case in cases:
        recorder.case = f"{operator}: {case}"
        with recorder.recording(), emulated.emulated(family):
            assert verify.comparisons(operator, torch.device("cpu"))[case]("bfloat16").passed, recorder.case
    return list(recorder.launches.values())


def tests(family: str, limit: int) -> Iterator[tuple[str, str, str]]:
    """The PTX of tests: each row is a fault that tpfuse raises."""
    recorder, files = LaunchRecorder(), map(str, sorted((TESTS / "explore").glob("test_ptx*.py")))
    with recorder.recording():
        pytest.main(["-q", "-n", "0", "-k", "not opcode", *files], plugins=[recorder])
    for launch in recorder.launches.values():
        result, reason, _ = examined(launch, limit)
        yield launch.fault or "none", WORDS.get(result, "unsupported"), f"{launch.case}: {reason}"


def kernels(family: str, limit: int) -> Iterator[tuple[str, str, str]]:
    """The unchanged kernels. If every race is a pair of stores of the same value, the table says so."""
    for launch in launched(family, [(name, x.name) for name in operators.names() for x in operators.load(name).cases]):
        result, reason, races = examined(launch, limit)
        equal = result == "potential_race" and races == launch.equal
        word = "found: equal stores alone" if equal else WORDS.get(result, "unsupported")
        yield launch.kernel.name, word, f"{launch.case}: {reason}, {races} races, {launch.equal} equal stores"


def mutants(family: str, limit: int) -> Iterator[tuple[str, str, str]]:
    """Kernels in which SentryWard finds no race, with a line changed: who finds it?"""
    sys.argv[1:], sys.path[:0] = [family], [str(TESTS / "tools")]
    cases, first = import_module("emulated_cases"), operators.load("attention").cases[0].name
    chosen = [x for x in launched(family, [("attention", first)]) if x.kernel.name in MUTATED]
    for launch, mutation in itertools.product(chosen, cases.MUTATIONS):
        for line, text in cases.mutants(launch.kernel.text, mutation, MOST):
            kept = cases.Recorded(launch.kernel, launch.grid, launch.arguments, launch.before, launch.after)
            ours = "found" if kept.found(Kernel(text, launch.kernel.shared)) else "not found"
            result, reason, _ = examined(launch, limit, text)
            word = f"{ours}, SentryWard: {WORDS.get(result, 'unsupported')}"
            yield mutation, word, f"{launch.kernel.name} {line} {reason}"


def dialect(family: str, limit: int) -> Iterator[tuple[str, str, str]]:
    """The unchanged kernels in Triton's dialect, all of those that launchers would compile."""
    analyze = import_module("triton_viz.clients.race_detector.compiled").analyze_ttgir
    for job in recorded.record(operators.names(), [family], ["bfloat16"]).jobs:
        backend, context = make_backend(recorded.target(family)), ir.context()
        options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
        ir.load_dialects(context)
        backend.load_dialects(context)
        modules = backend.get_codegen_implementation(options), backend.get_module_map()
        code, stages = job.source.make_ir(backend.target, options, *modules, context), dict[str, Any]()
        backend.add_stages(stages, options, job.source.language)
        metadata = {**vars(options), "target": backend.target}
        for stage in itertools.takewhile(lambda stage: stage != "llir", stages):
            code = stages[stage](code, metadata)
        found = analyze(str(code))
        word = ("found" if found.reports else "race-free") if found.status == "ok" else found.status
        yield job.source.name, word, re.sub(r"^line \d+: ", "", found.unsupported_reason or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {x.__name__: x for x in (tests, kernels, mutants, dialect)}
    parser.add_argument("parts", nargs="+", choices=[*parts])
    parser.add_argument("--tools", type=Path, required=True, help="the folder in which the other checkers are")
    parser.add_argument("--family", choices=["sm_80", "sm_90"], default="sm_80")
    parser.add_argument("--limit", type=int, default=60, help="seconds for each examination")
    given = parser.parse_args()
    sys.path += map(str, sorted(given.tools.iterdir()))
    torch.set_num_threads(1)
    for part in given.parts:
        tool = "triton_viz.clients.race_detector.compiled" if part == "dialect" else "sentryward.frontend.ptx_native"
        try:
            import_module(tool)
        except ImportError as error:
            print(f"{part}: skipped, since {tool} is not in {given.tools}: {error}")
            continue
        rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row, word, note in parts[part](given.family, given.limit):
            rows[row][word] += 1
            print(f"{row}: {word}; {note}", flush=True)
        columns = sorted({word for counts in rows.values() for word in counts})
        print("", f"| {part}, {given.family} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", sep="\n")
        for row, counts in rows.items():
            print(f"| {row} | {' | '.join(str(counts[word]) for word in columns)} |")


if __name__ == "__main__":
    main()
