"""Every benchmark on one GPU within some minutes: the figures to reach first, then what other shapes there is time for.

    python -m benchmarks.gpu --minutes 8 --out FOLDER

Each benchmark runs in a process of its own, forked from one that has imported torch: what crashes or hangs costs its
own rows that are not written yet, and the time it was given. The ceilings of the device are measured once, first. The
last lines are the figures; everything is in benchmarks/results/gpu-DATE-DEVICE.json, and in FOLDER.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.figures import Figure, cost, figures_table, memory, of_copy, speedup
from benchmarks.harness import OURS, RESULTS, Case, Row, Scale, kernel_provenance, measure, new_stage, table, unable
from benchmarks.timing import Ceilings, one_line
from tpfuse.kernels import launch
from tpfuse.profile import cases
from tpfuse.profile.compilation import compile_here

# Operators in the order of their importance, with the share of the time that their asked cases may take.
SHARES = {
    "gemm": 0.34,
    "overlapped_gemm": 0.15,
    "attention": 0.18,
    "carried_attention": 0.06,
    "linear_cross_entropy": 0.08,
    "layer_norm": 0.06,
    "rms_norm": 0.04,
    "adamw": 0.05,
    "sharded_adamw": 0.04,
    "cross_entropy": 0.0,
    "rope": 0.0,
}
_KERNELS = {  # where they have other names
    "overlapped_gemm": ("all_gather_gemm", "gemm_reduce_scatter"),
    "carried_attention": ("ring_attention", "ring_attention_backward"),
}
NO_TIME = "not measured: no time left"
_GRACE = 20.0  # seconds past its time after which a benchmark is ended


def _gemm(name: str, mode: str, asked: float, peer: str, case: str) -> Figure:
    return Figure(f"gemm {name}", "gemm", mode, asked, peer, speedup, case=case)


def _of_copy(operator: str, mode: str, asked: float = 0.85) -> Figure:
    return Figure(f"{operator} {mode}, part of copy bandwidth", operator, mode, asked, None, of_copy)


def _overlapped(name: str, mode: str, asked: float, case: str, *peers: str) -> Figure:
    return Figure(name, "overlapped_gemm", mode, asked, peers, cost, at_most=True, case=case)


def _carried(mode: str) -> Figure:
    name = f"carried attention {mode}, blocks present / attention"
    return Figure(name, "carried_attention", mode, 1.05, "attention", cost, at_most=True)


def _attention(mode: str, asked: float, peer: str) -> Figure:
    """cuDNN is the peer on compute capability 9.0 and 10.0, where it is the fastest that there is; flash on others."""
    return Figure(f"attention {mode} / {peer}", "attention", mode, asked, peer, speedup)


FIGURES = (
    _gemm("+ bias + gelu / eager, no graph", "inference", 1.10, "F.linear + activation", ", gelu"),
    _gemm("+ bias + gelu / eager, in training", "forward", 1.10, "F.linear + activation", ", gelu"),
    _gemm("+ bias + gelu / torch.compile, no graph", "inference", 1.00, "torch.compile max-autotune", ", gelu"),
    _gemm("+ bias + gelu / torch.compile, in training", "forward", 1.00, "torch.compile max-autotune", ", gelu"),
    _gemm("plain / cuBLAS", "inference", 0.95, "F.linear", "plain"),
    _overlapped("all_gather_gemm, chunks present / gemm", "all_gather_gemm", 1.03, "gather", "gemm"),
    _overlapped("gemm_reduce_scatter, nobody late / gemm", "gemm_reduce_scatter", 1.03, "scatter", "gemm"),
    _overlapped(
        "all_gather_gemm / longer of copies and gemm", "from host memory", 1.05, "link", "copies alone", "gemm"
    ),
    _attention("forward", 0.75, "SDPA cudnn"),
    _attention("backward", 0.50, "SDPA cudnn"),
    _attention("forward", 1.00, "SDPA flash"),
    _attention("backward", 1.00, "SDPA flash"),
    _carried("forward"),
    _carried("backward"),
    _of_copy("layer_norm", "forward"),
    _of_copy("layer_norm", "backward"),
    _of_copy("rms_norm", "forward"),
    _of_copy("rms_norm", "backward"),
    _of_copy("adamw", "step"),
    _of_copy("sharded_adamw", "step", 0.80),
    Figure("linear_cross_entropy / eager", "linear_cross_entropy", "both", 1.00, "F.cross_entropy(F.linear)", speedup),
    Figure(
        "linear_cross_entropy memory / eager's",
        "linear_cross_entropy",
        "both",
        0.25,
        "F.cross_entropy(F.linear)",
        memory,
        at_most=True,
    ),
)


@dataclass(frozen=True)
class Plan:
    """What all processes of a run share."""

    scale: Scale
    seed: int
    ceilings: Ceilings | None = None

    @property
    def interpreted(self) -> bool:
        """Whether this is the trial run on the CPU."""
        return self.scale == "tiny"


def _write(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def measure_device(plan: Plan, path: Path) -> None:
    """Writes where this runs, and the ceilings."""
    stage = new_stage(plan.seed, interpreted=plan.interpreted)
    _write(path, kernel_provenance() | {"seed": plan.seed, "ceilings": asdict(stage.ceilings)})


def compile_ahead(operators: Sequence[str], path: Path) -> None:
    """Compiles on all cores what the operators launch at typical shapes; Triton then finds most of it in its cache."""
    wanted = [name for operator in operators for name in _KERNELS.get(operator, (operator,))]
    known = [name for name in wanted if name in cases.names()]
    report = compile_here(known, [launch.family(torch.device("cuda", 0))], ["bfloat16"])
    _write(path, {"compiled_ahead": len(report.compilations)})


def measure_operator(operator: str, asked: bool, seconds: float, plan: Plan, path: Path) -> None:
    """Writes the rows of an operator's cases, those that are asked for or the others; past `seconds` none is begun."""
    deadline = monotonic() + seconds
    module_cases: list[Case] = importlib.import_module(f"benchmarks.bench_{operator}").cases(plan.scale)
    stage = new_stage(plan.seed, interpreted=plan.interpreted, ceilings=plan.ceilings)
    if not asked:
        stage.seconds /= 3
    waiting = [case for case in module_cases if case.asked == asked]
    while waiting and monotonic() < deadline:
        for row in measure(waiting.pop(0), stage):
            _write(path, row)
    for case in waiting if asked else []:
        _write(path, _failed(operator, case.name, asked, NO_TIME))
    if waiting and not asked:
        _write(path, _failed(operator, f"{len(waiting)} others", asked, NO_TIME))


def _failed(operator: str, case: str, asked: bool, error: str) -> Row:
    return {"operator": operator, "case": case, "asked": asked, "mode": "", "contender": OURS, "error": error}


def _child(function: Callable[[], None], path: Path, label: tuple[str, bool]) -> None:
    """The whole of a process: in a session of its own, so that what it starts can be ended with it."""
    os.setsid()
    try:
        function()
    except Exception as error:
        _write(path, _failed(label[0], "all", label[1], one_line(error)))


def run_apart(function: Callable[[], None], path: Path, label: tuple[str, bool], seconds: float) -> None:
    """Runs it in a process; one that dies, or is not done after `seconds`, leaves a row that says so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.contenders", "torch._dynamo"])
    process = context.Process(target=_child, args=(function, path, label))
    process.start()
    assert process.pid is not None
    process.join(max(seconds, 1.0))
    if process.is_alive():
        _write(path, _failed(label[0], "all that follow", label[1], f"ended: not done after {seconds:.0f} s"))
    elif process.exitcode:
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit status {process.exitcode}"
        _write(path, _failed(label[0], "all that follow", label[1], f"the process ended with {name}"))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with the compiler's processes, where there are some
    process.kill()
    process.join()


def run_all(plan: Plan, operators: Sequence[str], minutes: float, folder: Path) -> tuple[Row, list[Row]]:
    """(where and with what, rows). Raises RuntimeError where not even the ceilings could be measured."""
    deadline = monotonic() + 60 * minutes
    if not plan.interpreted:
        path = folder / "compiled.jsonl"
        run_apart(partial(compile_ahead, operators, path), path, ("compiling ahead", True), min(60.0, 10 * minutes))
    path = folder / "device.jsonl"
    run_apart(partial(measure_device, plan, path), path, ("ceilings", True), 120)
    device = json.loads(path.read_text().splitlines()[0])
    if "error" in device:
        raise RuntimeError(device["error"])
    plan = Plan(plan.scale, plan.seed, Ceilings(**device["ceilings"]))
    path = folder / "rows.jsonl"
    path.touch()
    for asked in (True,) if plan.interpreted else (True, False):
        for index, operator in enumerate(operators):
            left = deadline - monotonic() - _GRACE
            seconds = left / (len(operators) - index)
            if asked and not plan.interpreted:
                seconds = min(60 * minutes * SHARES[operator], left)
            if seconds > 2:
                call = partial(measure_operator, operator, asked, seconds, plan, path)
                run_apart(call, path, (operator, asked), seconds + _GRACE)
            elif not asked or SHARES[operator]:
                _write(path, _failed(operator, "all that follow", asked, NO_TIME))
    return device, [json.loads(line) for line in path.read_text().splitlines()]


def _save(document: Row, out: Path | None, keep: bool) -> list[Path]:
    device = re.sub(r"[^a-z0-9]+", "-", document["machine"].lower()).strip("-")
    name = f"gpu-{document['date']}-{device}.json"
    paths = [folder / name for folder in ([RESULTS] if keep else []) + ([out] if out else [])]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return paths


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(SHARES)}; default: all")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--quick", action="store_true", help="only the shapes that matter most")
    parser.add_argument("--interpreted", action="store_true", help="tiny shapes on the CPU, to see that it works")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the JSON there too")
    parser.add_argument("--seed", type=int, default=int(torch.seed() % 2**31), help="of the inputs; default: a new one")
    arguments = parser.parse_args()
    for name in set(arguments.operators) - set(SHARES):
        parser.error(f"there is no operator {name}: expected one of {', '.join(SHARES)}")
    return arguments


def main() -> int:
    """Exit status 1 where one of our rows could not be measured, 2 where there is no GPU."""
    arguments = _arguments()
    complaint = unable("benchmarks.gpu", arguments.interpreted)
    if complaint:
        print(complaint, file=sys.stderr)
        return 2
    scale: Scale = "tiny" if arguments.interpreted else "quick" if arguments.quick else "all"
    operators = arguments.operators or list(SHARES)
    with tempfile.TemporaryDirectory() as folder:
        device, rows = run_all(Plan(scale, arguments.seed), operators, arguments.minutes, Path(folder))
    said = [] if arguments.interpreted else rows  # times of the interpreter say nothing
    outcomes: list[dict[str, Any]] = [figure.outcome(said, device["ceilings"]["copy"]) for figure in FIGURES]
    document = device | {"interpreted": arguments.interpreted, "figures": outcomes, "rows": rows}
    paths = _save(document, arguments.out, keep=not arguments.interpreted)
    print(table(rows), end="\n\n")
    print(f"{device['machine']}, {device['date']}, torch {device['torch']}, triton {device['triton']}: ", end="")
    print(f"{device['ceilings']['matrix'] / 1e12:.0f} TFLOP/s of bf16 products, ", end="")
    print(f"{device['ceilings']['copy'] / 1e12:.2f} TB/s of copies; seed {arguments.seed}", end="\n\n")
    print(figures_table(outcomes))
    print(f"kept in {', '.join(map(str, paths)) or 'no file'}")
    return int(any("median_us" not in row for row in rows if row["contender"] == OURS))


if __name__ == "__main__":
    sys.exit(main())
