"""The steps of `benchmarks.first_contact`: on a GPU, or in a rehearsal, interpreted on a CPU.

A rehearsal takes the same steps, each with one of what it does on a GPU: an operator has one case, one program of ranks
runs, of two ranks that alternate in the explorer, one run stands for all sanitizers, and one file of tests, which need
a GPU and skip themselves. Shapes are tiny, and the tuner's clock is the host's.
"""

import itertools
import os
import random
import shutil
import subprocess
import sys
import timeit
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch
import triton

from benchmarks.apart import ALL, Later, Row, Rows, Step, failed, read
from benchmarks.harness import OURS, Bench, BenchCase, measure, new_bench, provenance
from benchmarks.timing import Ceilings
from tpfuse.kernels import configurations, launch
from tpfuse.kernels.configurations import Configuration
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.models.gpt_config import GPTConfig
from tpfuse.testing.compare import unwritten_memory_is_nan
from tpfuse.testing.one_process import ENVIRONMENT, OneProcess, OneProcessMemory
from tpfuse.tools import doctor, tune, verify
from tpfuse.tools import operators as cases
from tpfuse.tools.assembler import newer_ptxas, packaged
from tpfuse.tools.machine import Machine
from tpfuse.tools.operators import tiny_trials, trials
from tpfuse.tools.rank_programs import PROGRAMS, TINY, Sizes, iterate, load
from tpfuse.tools.search import Tuner
from tpfuse.tools.search_space import SPACES
from tpfuse.tools.search_space import Step as Space
from tpfuse.tools.training import train_each

Item = TypeVar("Item")

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("bfloat16", "float32")
WORLDS = (2, 4)
ROUNDS = 200
# The benchmarks that are timed as soon as the operators are known to be right.
FIRST_TIMED = ("gemm", "attention")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
TESTS = (
    "tests/comm/test_cuda_ranks.py",
    "tests/ops/linear/test_cuda.py",
    "tests/zero/test_cuda.py",
    "tests/train/test_step_graph.py",
)
TUNED = ("gemm", "all_gather_gemm", "attention_forward")
# The benchmarks in the order of their importance, with the seconds that a turn of each may take.
TIMED = {
    "gemm": 120,
    "overlapped_gemm": 90,
    "attention": 90,
    "carried_attention": 40,
    "linear_cross_entropy": 40,
    "layer_norm": 30,
    "rms_norm": 20,
    "adamw": 20,
    "sharded_adamw": 20,
    "cross_entropy": 20,
}
COMPILED = ("gemm", "layer_norm", "rms_norm", "cross_entropy")  # those that have torch.compile as a peer
# The share of a rank's rounds that are late, and the longest delay in cycles of a multiprocessor, about half a ms.
_LATE, _LONGEST = 0.2, 1_000_000
# Rounds that a thread may be ahead of its stream, by the number of ranks. Where that stream's queue is full, a launch
# waits, and launches of other threads wait for it: by copy engines, 2 ranks that were 16 rounds ahead and 4 ranks that
# were 2 rounds ahead waited for ever on an H100.
_AHEAD = {2: 2, 4: 1}
_TOO_MANY = ("gemm_reduce_scatter, copy engines", 4)  # ranks for the queues: they wait for ever 1 round ahead too
_LOADING, _RUNNING = 240.0, 60.0  # seconds
_SHORT = 360.0  # seconds after which a step that a GPU of some minutes runs first begins no row
TINY_GPT = GPTConfig(64, 16, 32, 2, 2)  # of a rehearsal
_COMPARED = "compared: "  # begins the lines that `main` prints


@dataclass(frozen=True)
class Plan:
    """The settings that all steps share.

    operators: the selected names of `cases` and of TIMED. keep: whether rows between GPUs go to benchmarks/results.
    """

    out: Path
    rehearse: bool
    seed: int
    operators: tuple[str, ...]
    keep: bool = False

    @property
    def device(self) -> torch.device:
        """Return the device on which kernels run."""
        return torch.device("cpu") if self.rehearse else torch.device("cuda", 0)

    def few(self, items: Iterable[Item]) -> list[Item]:
        """Return all items, or in a rehearsal the first one."""
        return list(items)[: 1 if self.rehearse else None]

    @property
    def compared(self) -> list[str]:
        """Return the selected operators that have cases."""
        return [name for name in cases.names() if name in self.operators]


def steps(plan: Plan) -> dict[str, list[Step]]:
    """Return all steps by group, in order."""
    from benchmarks import contact_host, contact_products, contact_training  # they import this module

    interpret = "1" if plan.rehearse else "0"
    environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TRITON_INTERPRET": interpret}

    def one_row(name: str, row: str, work: Callable[[Plan, Rows], Row], **options: Any) -> Step:
        return Step(name, partial(make_row, row, partial(work, plan)), **options)

    def timed(group: str, factor: int, names: Collection[str] = tuple(TIMED)) -> list[Step]:
        return [
            Step(f"{group}: {name}", partial(time_operator, plan, name, group), 300.0, TIMED[name] * factor)
            for name in names
            if name in plan.operators
        ]

    return {
        "device": [one_row("device", "device", tell_device, again=True)],
        "speed_124m": [Step("speed_124m", partial(contact_training.speed_124m, plan), 300.0, _SHORT)],
        "epilogues": [Step("epilogues", partial(contact_products.epilogues, plan), 300.0, _SHORT)],
        "gather_scatter": [Step("gather_scatter", partial(contact_products.gather_scatter, plan), 300.0, _SHORT)],
        "host": [Step("host", partial(contact_host.host, plan), 120.0, 120.0)],
        "compile": [one_row("compile", "compile", fill_cache, most=300.0, again=True)],
        "operators": [
            Step(f"operators: {name}", partial(compare_operator, plan, name, DTYPES), most=90.0)
            for name in plan.compared
        ],
        "blame": [
            Step(f"blame: {name}", partial(blame, plan, name), most=60.0, environment=changed, again=True)
            for name, changed in suspects().items()
        ],
        "timings": [
            one_row("ceilings", "ceilings", find_ceilings),
            *timed("timings", 1, FIRST_TIMED),
        ],
        "one process": [
            Step(f"one process: {world} ranks", partial(run_ranks, plan, world), 300.0, environment=ENVIRONMENT)
            for world in plan.few(WORLDS)
        ],
        "processes": [
            Step(f"processes: {file}", partial(run_tests, file), 200.0, most=180.0, least=30.0, environment=environment)
            for file in plan.few(TESTS)
        ],
        "verify": [one_row("verify", "training", train, patience=400.0, least=30.0)],
        "sanitizers": [
            Step("sanitizers", partial(sanitize, plan), 200.0, least=60.0),
            one_row("ConSan", "ConSan", sanitize_pipelines, patience=300.0, least=60.0),
        ],
        "other timings": timed("timings", 1, [name for name in TIMED if name not in FIRST_TIMED]),
        "nodes": [Step("nodes", partial(time_node, plan), 600.0, least=60.0)],
        "torch.compile": timed("torch.compile", 2, COMPILED),
        "tune": [
            Step(f"tune: {name}", partial(tune_operator, plan, name), 900.0, least=60.0)
            for name in TUNED
            if name in plan.operators
        ],
        "float16": [
            Step(f"float16: {name}", partial(compare_operator, plan, name, ("float16",)), most=60.0)
            for name in plan.compared
            if name in FIRST_TIMED
        ],
        "more timings": timed("more timings", 1),
    }


def make_row(name: str, work: Callable[[Rows], Row], rows: Rows) -> None:
    """Make the one row of a step."""
    rows.each(name, partial(work, rows))


def tell_device(plan: Plan, rows: Rows) -> Row:
    """Return the device, versions, commit and command, and the properties of the machine."""
    findings = [asdict(finding) for finding in doctor.examine(Machine())]
    return provenance() | {"seed": plan.seed, "findings": findings}


def fill_cache(plan: Plan, rows: Rows) -> Row:
    """Compile on all cores, so that Triton then finds most kernels in its cache."""
    family = "sm_90" if plan.rehearse else launch.family(plan.device)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = "--warm", "--families", family, "--dtypes", *plan.few(DTYPES)
    command = sys.executable, "-m", "tpfuse.tools.compilation", *plan.few(plan.compared), *options
    lines, failed = run_program(rows, command, environment, rows.until)
    return {"kernels": len(lines), "family": family, "dtypes": plan.few(DTYPES)} | failed


def run_program(
    rows: Rows, command: Sequence[str], environment: Mapping[str, str] = os.environ, until: float = float("inf")
) -> tuple[list[str], Row]:
    """Run a program, whose lines show that the row in progress does not hang, and return them.

    The row that is returned too has the end of the log as its error where the program fails, and a note where it was
    ended at `until`.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        rows.alive()
        if monotonic() > until:
            process.kill()
            return lines, {"note": "ended, since there was no time left"}
    log = rows.folder / "log.txt"
    return lines, {"error": log.read_text(errors="replace")[-2000:].strip()} if process.wait() else {}


def compare_operator(plan: Plan, operator: str, dtypes: Sequence[str], rows: Rows) -> None:
    """Compare an operator with its reference, as `tpfuse verify` does."""
    works = list(verify.comparisons(operator, plan.device).items())
    for dtype in dtypes:
        for name, work in plan.few(works):
            rows.each(f"{name}, {dtype}", partial(_compare, work, dtype))


def _compare(work: Callable[[str], verify.Comparison], dtype: str) -> Row:
    with unwritten_memory_is_nan():
        comparison = work(dtype)
    row: Row = {"passed": comparison.passed, "tensor": comparison.tensor}
    row |= {"largest": comparison.error, "bound": comparison.bound}
    return row | ({"error": comparison.failure} if comparison.failure else {})


def suspects() -> dict[str, dict[str, str]]:
    """Return what a failing case is tried again with, and the variables of the process that does so."""
    newer = newer_ptxas()
    return {"newer ptxas": {"TRITON_PTXAS_PATH": newer.path} if newer else {}, "one stage": {}}


def blame(plan: Plan, suspect: str, rows: Rows) -> None:
    """Try the first failing case of each operator again without a suspect, to tell whose fault it is."""
    compared = [row for row in read(plan.out) if row["step"].startswith("operators: ") and row.get("row", ALL) != ALL]
    failing = {row["step"].partition(": ")[2]: row["row"] for row in reversed(compared) if failed(row)}
    note = "" if failing else "no case of the operators has failed"
    if suspect == "newer ptxas" and newer_ptxas() is None:
        note = "no newer ptxas is installed: pip install 'nvidia-cuda-nvcc>=13.3'"
    if note:
        rows.each("none", lambda: {"note": note})
    for operator, name in failing.items() if not note else ():
        rows.each(f"{operator}, {name}", partial(_blame, plan, suspect, operator, name))


def _blame(plan: Plan, suspect: str, operator: str, name: str) -> Row:
    work_name, _, dtype = name.rpartition(", ")
    work = verify.comparisons(operator, plan.device)[work_name]
    plain = [replace(row, num_stages=1) for row in configurations.read_table(configurations.TABLE)]
    with configurations.override(*plain if suspect == "one stage" else ()):
        found = _compare(work, dtype)
    told = "right" if found["passed"] else "fails too"
    row = {"outcome": f"{told} with {suspect}", "environment": suspects()[suspect]}
    return row | {"largest": found["largest"], "bound": found["bound"]}


def sanitize(plan: Plan, rows: Rows) -> None:
    """Run the first case of each operator under each tool of NVIDIA's compute-sanitizer; once in a rehearsal."""
    found = compute_sanitizer()

    def run(tool: str) -> Row:
        if found is None and not plan.rehearse:
            return {"note": "there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api"}
        prefix = [] if plan.rehearse else [str(found), "--tool", tool, "--error-exitcode", "9"]
        lines, failed = run_program(rows, [*prefix, *first_cases(plan.compared)])
        done = [line.removeprefix(_COMPARED) for line in lines if line.startswith(_COMPARED)]
        if failed:
            reports = [line for line in lines if not line.startswith(_COMPARED)]
            failed = {"error": "\n".join([*reports[-40:], failed["error"]])}
        return {"passed": not failed, "operators": done} | failed

    for tool in plan.few(SANITIZERS):
        rows.each(tool, partial(run, tool))


def first_cases(operators: Sequence[str]) -> list[str]:
    """Return the command that compares the first case of each of the operators."""
    return [sys.executable, "-m", "benchmarks.contact_steps", *operators]


def compute_sanitizer() -> Path | None:
    """Return the program of the CUDA toolkit or of the package nvidia-cuda-sanitizer-api; None without either."""
    if found := shutil.which("compute-sanitizer"):
        return Path(found)
    places = [Path("/usr/local/cuda/bin/compute-sanitizer"), *packaged("compute-sanitizer")]
    return next(filter(Path.is_file, places), None)


def sanitize_pipelines(plan: Plan, rows: Rows) -> Row:
    """Run the first cases of the products and of attention under Triton's own sanitizer of asynchronous copies.

    ConSan checks that nothing reads or writes shared memory that a copy or a product in flight still uses.
    """
    if not triton.__version__.startswith("3.6."):
        return {"note": f"ConSan compiles these kernels with Triton 3.6 alone, and this is {triton.__version__}"}
    command = first_cases([name for name in plan.compared if name in FIRST_TIMED])
    return run_program(rows, command, os.environ | {"TRITON_INSTRUMENTATION_MODE": "consan"})[1]


def run_ranks(plan: Plan, world: int, rows: Rows) -> None:
    """Run all ranks in this process, each on a stream of its own, late at random, over the largest epoch."""
    for name in plan.few(PROGRAMS):
        rows.each(name, partial(_run_ranks, plan, name, world), fatal=True)


def _run_ranks(plan: Plan, name: str, world: int) -> Row:
    if (name, world) == _TOO_MANY and not plan.rehearse:
        return {"note": "one GPU has too few queues for so many ranks with copy engines"}
    rounds = 2 if plan.rehearse else ROUNDS
    different = explored(name, world, rounds) if plan.rehearse else at_once(name, world, plan.device, plan.seed, rounds)
    wrong = {rank: turns[:10] for rank, turns in enumerate(different) if turns}
    return {"passed": not wrong, "world": world, "rounds": rounds, "rounds that differ, by rank": wrong}


def at_once(name: str, world: int, device: torch.device, seed: int, rounds: int) -> list[list[int]]:
    """Return the rounds of each rank that differ from the first rounds with these inputs, on a GPU.

    Raise AssertionError where one of the first rounds is wrong, and PeerTimeout where a rank waits without success.
    """
    ranks = OneProcess(world, device, timeout=_LOADING)
    with ranks.aborted():
        programs = ranks.in_turn(lambda memory: load(memory, name, Sizes()))
    ranks.timeout = _RUNNING

    def run(memory: OneProcessMemory) -> list[int]:
        late, turns = random.Random(f"{seed} {memory.rank}"), itertools.count(1)

        def delay() -> None:
            if next(turns) % _AHEAD[world] == 0:
                torch.cuda.current_stream(device).synchronize()
            if late.random() < _LATE:
                torch.cuda._sleep(int(late.random() * _LONGEST))  # type: ignore[no-untyped-call]

        return iterate(memory, programs[memory.rank], rounds, delay)

    return ranks.at_once(run)


def explored(name: str, world: int, rounds: int) -> list[list[int]]:
    """Return the rounds of each rank that differ, in the explorer, under one schedule."""
    from tpfuse.explore import Sequential, SimulatedMemory, explore  # this import patches Triton's interpreter

    different: dict[int, list[int]] = {}

    def program(memory: SimulatedMemory) -> None:
        different[memory.rank] = iterate(memory, PROGRAMS[name](memory, TINY), rounds)

    explore(program, world, schedules=[Sequential()], resident=3)
    return [different[rank] for rank in range(world)]


class RowPerTest:
    """A plugin of pytest that runs the tests without a row, and keeps one for each. late: no time was left for all."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._found, self.late = rows, Row(), False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._rows.done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        try:
            self._rows.begin(nodeid)
        except Later:
            self.late = True
            raise KeyboardInterrupt from None  # this ends the session

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "setup":
            self._found = {"outcome": "passed", "passed": True, "seconds": 0.0}
        self._found["seconds"] += report.duration
        if report.outcome == "skipped":
            self._found |= {"outcome": "skipped", "why": str(report.longrepr)[-300:]}
        elif report.outcome == "failed":
            self._found |= {"outcome": "failed", "passed": False, "error": _end_of(report)}
        if report.when == "teardown":
            self._rows.write(report.nodeid, self._found)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._rows.write(report.nodeid, {"error": _end_of(report)})


def _end_of(report: Any) -> str:
    return "\n".join(report.longreprtext.splitlines()[-12:])


def run_tests(file: str, rows: Rows) -> None:
    """Run the tests of ranks on a GPU, each rank in its own process. Raise Later."""
    import pytest  # no other step needs pytest

    os.chdir(ROOT)
    plugin = RowPerTest(rows)
    pytest.main([file, "-m", "gpu", "-p", "no:cacheprovider", "--no-header"], plugins=[plugin])
    if plugin.late:
        raise Later


def train(plan: Plan, rows: Rows) -> Row:
    """Return the result of `tpfuse verify --operators training`."""
    runs = train_each(sizes=TINY_GPT) if plan.rehearse else train_each()
    return {"passed": all(run.passed for run in runs), "training": [asdict(run) for run in runs]}


def find_ceilings(plan: Plan, rows: Rows) -> Row:
    """Return the highest rates that the device reaches."""
    return {"ceilings": asdict(new_bench(plan.seed, interpreted=plan.rehearse).ceilings)}


def kept_ceilings(rows: Sequence[Row]) -> Ceilings | None:
    """Return the ceilings of the last row that has some."""
    ceilings = [row["ceilings"] for row in rows if "ceilings" in row]
    return Ceilings(**ceilings[-1]) if ceilings else None


def time_operator(plan: Plan, operator: str, group: str, rows: Rows) -> None:
    """Check and time the cases of a benchmark.

    The group "timings" has the cases of the figures, without torch.compile. The group "torch.compile" has those of them
    that have torch.compile as a peer, with it. The group "more timings" has all other cases.
    """
    from benchmarks.bench_operators import CASES  # no other step needs the peers

    bench = new_bench(plan.seed, interpreted=plan.rehearse, ceilings=kept_ceilings(read(plan.out)))
    bench.compiler = group != "timings"
    bench.seconds /= 3 if group == "more timings" else 1
    for case in CASES[operator](plan.rehearse):
        if case.asked == (group != "more timings") and (case.compiled or group != "torch.compile"):
            rows.each(case.name, partial(time_case, case, bench))


def time_case(case: BenchCase, bench: Bench) -> Row:
    """Return the rows of a case's candidates as "measurements", and an error where one of tpfuse's has none."""
    measured = list(measure(case, bench))
    failed = [row["error"] for row in measured if row["candidate"] == OURS and "median_us" not in row]
    row: Row = {"passed": not failed, "ceilings": asdict(bench.ceilings), "measurements": measured}
    return row | ({"error": "; ".join(failed)} if failed else {})


def time_node(plan: Plan, rows: Rows) -> None:
    """Time NCCL and torch's fused operators beside tpfuse where there are several GPUs; CPU ranks in a rehearsal.

    The programs write their rows themselves. A rehearsal leaves out the collectives, whose program would write the
    times of CPU ranks.
    """
    count = 2 if plan.rehearse else torch.cuda.device_count()
    start = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"
    keep = ["--keep"] if plan.keep else []

    def run(*program: str) -> Row:
        if count < 2:
            return {"note": "one GPU: there is no NCCL to compare with"}
        table, failed = run_program(rows, [*start, *program, *keep])
        return {"ranks": count, "table": table} | failed

    scale = "tiny" if plan.rehearse else "quick"
    rows.each("node", partial(run, "benchmarks.node", "--scale", scale, "--minutes", "5"))
    if not plan.rehearse:
        rows.each("collectives", partial(run, "benchmarks.collectives"))


def tune_operator(plan: Plan, operator: str, rows: Rows) -> None:
    """Tune the tile sizes: make a row for each row of the operator's table, and write the table. Raise Later."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        rows.alive()

    if plan.rehearse:
        everything = lambda tried, fitting: [""] * len(tried)  # noqa: E731
        measure, until = partial(timeit.timeit, number=1), rows.until
        tuner = Tuner(plan.device, torch.bfloat16, everything, measure, say, "a rehearsal", until)
        spaces: dict[str, tuple[Space, ...]] = {operator: ({"num_stages": (1, 2)},)}
    else:
        tuner, spaces = tune.tuner_of(plan.device, say, rows.until), SPACES

    def search(tuned: tune.TunedRow) -> Row:
        said.clear()
        best = tuned.best(tuner, spaces)
        if monotonic() > tuner.deadline:
            raise Later  # not every configuration was tried
        row: Row = {"passed": best is not None, "said": list(said)}
        return row | ({"best": asdict(best)} if best is not None else {"error": said[-1]})

    for tuned in tune.tuned_rows([operator], tuner, tiny_trials() if plan.rehearse else trials()):
        if tuned.fitting:
            rows.each(tuned.name, partial(search, tuned))
            found = [row for row in read(plan.out) if row["step"] == f"tune: {operator}" and "best" in row]
            table = configurations.TABLE.read_text(encoding="utf-8")
            text = tune.with_rows(table, [Configuration(**row["best"]) for row in found])
            (plan.out / f"configurations-{operator}.toml").write_text(text, encoding="utf-8")


def main() -> int:
    """Compare the first case of each of the named operators, for a sanitizer. Return 1 where one is wrong."""
    wrong, device = 0, torch.device("cpu" if INTERPRETED else "cuda")
    for operator in sys.argv[1:]:
        name, work = next(iter(verify.comparisons(operator, device).items()))
        comparison = work("bfloat16")
        wrong += not comparison.passed
        print(f"{_COMPARED}{operator}, {name}: {comparison.failure or comparison.error}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
