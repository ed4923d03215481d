"""`tpfuse verify`: compare every kernel with its reference on this machine.

The output and every gradient are compared three ways (`tpfuse.testing.compare`), on the GPU, or interpreted if there is
none. On a GPU the launches at the shapes of models are compared too: only those take the large tiles. Kernels are
interpreted in a process of their own, since Triton decides when they are imported whether to interpret them. Before the
comparisons, the report shows the findings of `tpfuse doctor`. After them, it shows two training steps with each
implementation of tensor parallelism (`tpfuse.tools.training`).
"""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from tpfuse._version import __version__
from tpfuse.comm.comparison import error_bound
from tpfuse.comm.limits import core_time, set_threads
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.errors import RunError, UserError
from tpfuse.kernels.interpreter import INTERPRETED, interpreter_problem
from tpfuse.switches import use
from tpfuse.testing.compare import Expected, check_kind, evaluate, largest_error, unwritten_memory_is_nan
from tpfuse.testing.inputs import normal
from tpfuse.testing.one_process import OneProcess
from tpfuse.tools import doctor
from tpfuse.tools import operators as cases
from tpfuse.tools.machine import Machine
from tpfuse.tools.operator import OneRank, Shape, Trial
from tpfuse.tools.rank_programs import ALONE, PROGRAMS, VARIANTS
from tpfuse.tools.recorded import DTYPES
from tpfuse.tools.search import copies, one_line, widened
from tpfuse.tools.training import TrainingRun, train_each

_LONGEST = 600.0  # seconds of a program, with the compilation of its kernels
TRAINING = "training"  # a name that may be given besides those of the operators


@dataclass(frozen=True)
class Comparison:
    """The result of a case in one dtype, for the output or gradient with the largest ratio of error to bound."""

    operator: str
    case: str
    dtype: str
    tensor: str = ""  # "out", the name of the input whose gradient it is, or that of a program's result
    error: float | None = None  # None if it is not finite, or if the case raised
    bound: float = 0.0
    failure: str = ""  # the exception, on one line

    @property
    def passed(self) -> bool:
        """Return whether the error is within the bound."""
        return self.error is not None and self.error <= self.bound


def compare(operator: str, case: Shape, dtype: str, device: torch.device) -> Comparison:
    """Run a case with the kernels and with its reference."""
    identity = operator, case.name, dtype
    try:
        inputs = {name: x.to(device) for name, x in case.seeded(DTYPES[dtype]).items()}
        with use(kernels="torch"):
            with torch.no_grad():
                shape = case.reference(**inputs).shape
            grad = normal(0, *shape, dtype=DTYPES[dtype]).to(device)
            expected = Expected(case.reference, inputs, grad)
        with use(kernels="triton"):
            actual = evaluate(case.function, inputs, grad)
        measured = [
            (name, expected.error(name, actual.get(name)), expected.bound(name)) for name in expected.same_dtype
        ]
    except Exception as error:
        return Comparison(*identity, failure=one_line(error))
    return _worst(identity, measured)


def compare_program(operator: str, case: OneRank, dtype: str, device: torch.device) -> Comparison:
    """Run a program with all its variants of inputs in a group of one rank."""

    def measured(memory: SymmetricMemory) -> list[tuple[str, float, float]]:
        program, found = PROGRAMS[case.program](memory, replace(ALONE, dtype=DTYPES[dtype])), []
        for variant in range(VARIANTS):
            results = program.run(variant)
            for name, (plain, exact, bound) in program.expected(variant).items():
                check_kind(name, results[name], plain)
                found.append((name, largest_error(results[name], exact), bound))
        return found

    identity = operator, case.name, dtype
    try:
        with torch.no_grad():
            return _worst(identity, OneProcess(1, device, timeout=_LONGEST, shared=False).alone(0, measured))
    except Exception as error:
        return Comparison(*identity, failure=one_line(error))


def compare_launch(operator: str, trial: Trial, dtype: str, device: torch.device) -> Comparison:
    """Run a launcher at the shape of a model, and compare its outputs with plain torch's."""
    identity = operator, trial.name, dtype
    try:
        inputs = trial.shape.drawn(device, DTYPES[dtype])
        plain, truth = trial.plain(**inputs), trial.plain(**widened(inputs))
        actual = trial.run(**copies(inputs))
        measured = [
            (f"output {number}", largest_error(x, exact), error_bound(same, exact))
            for number, (x, same, exact) in enumerate(zip(actual, plain, truth, strict=True))
        ]
    except Exception as error:
        return Comparison(*identity, failure=one_line(error))
    return _worst(identity, measured)


def _worst(identity: tuple[str, str, str], measured: Sequence[tuple[str, float, float]]) -> Comparison:
    """Return the comparison of the tensor whose error is the largest part of its bound.

    measured: (name, error, bound) of each tensor.
    """
    name, largest, bound = max(measured, key=lambda entry: entry[1] / entry[2] if entry[2] else entry[1])
    return Comparison(*identity, name, largest if math.isfinite(largest) else None, bound)


def comparisons(operator: str, device: torch.device) -> Mapping[str, Callable[[str], Comparison]]:
    """Return what is compared of an operator, by name; each is called with the name of a dtype."""
    description = cases.load(operator)
    works: dict[str, Callable[[str], Comparison]] = {}
    for case in description.cases:
        function: Any = compare_program if isinstance(case, OneRank) else compare
        works[case.name] = partial(function, operator, case, device=device)
    shapes = description.models if device.type == "cuda" else ()
    trials = [Trial(shape, mode) for shape in shapes for mode in shape.launchers()]
    return works | {trial.name: partial(compare_launch, operator, trial, device=device) for trial in trials}


def compare_here(operators: Sequence[str]) -> tuple[list[Comparison], list[TrainingRun]]:
    """Compare all cases of the operators in every dtype, in this process, which must have a GPU or interpret."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_threads(core_time())
    compared: list[Comparison] = []
    runs: list[TrainingRun] = []
    with unwritten_memory_is_nan():
        for operator in operators:
            if operator == TRAINING:
                _show_progress("two training steps with each implementation of tensor parallelism")
                runs = train_each()
                continue
            for name, work in comparisons(operator, device).items():
                for dtype in DTYPES:
                    _show_progress(f"{operator}: {name}, {dtype}")
                    compared.append(work(dtype))
    _show_progress("")
    return compared, runs


def _show_progress(text: str) -> None:
    """Show on a terminal what is compared now, in place of what was compared before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


def compare_in_subprocess(operators: Sequence[str]) -> tuple[list[Comparison], list[TrainingRun]]:
    """Run `compare_here` in a Python process that interprets kernels. Raise RunError if that fails."""
    if problem := interpreter_problem():
        raise RunError(problem)
    done = subprocess.run(
        [sys.executable, "-m", "tpfuse", "verify", "--json", "--operators", *operators],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    if not done.stdout:
        raise RunError(f"the interpreting process ended with exit status {done.returncode}")
    output = json.loads(done.stdout)
    comparisons = [Comparison(**_without_verdict(entry)) for entry in output["comparisons"]]
    runs = [TrainingRun(**_without_verdict(entry)) for entry in output["training"]]
    return comparisons, [replace(run, losses=tuple(run.losses)) for run in runs]


def _without_verdict(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in entry.items() if name != "passed"}


@dataclass(frozen=True)
class Verification:
    """The results of `tpfuse verify`."""

    machine: list[doctor.Finding]
    device: str
    comparisons: list[Comparison]
    training: list[TrainingRun]

    @property
    def passed(self) -> bool:
        """Return whether every check has passed."""
        return all([x.passed for x in self.comparisons] + [x.passed for x in self.training])


def chosen(operators: Sequence[str]) -> Sequence[str]:
    """Return `operators`, or all operators if it is empty. Raise UserError for an unknown operator."""
    known = [*cases.names(), TRAINING]
    for name in operators:
        if name not in known:
            raise UserError(f"operator {name!r} is not known: expected some of {', '.join(known)}")
    return operators or known


def verify(operators: Sequence[str]) -> Verification:
    """Compare the kernels of `operators`. An empty sequence stands for all operators.

    One of the operators may be "training": two steps of the tiny GPT with each implementation of tensor parallelism.

    Raise UserError for an unknown operator, and RunError if the comparison cannot start.
    """
    operators = chosen(operators)
    gpu = torch.cuda.is_available()
    comparisons, training = (compare_here if gpu or INTERPRETED else compare_in_subprocess)(operators)
    device = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, interpreted"
    return Verification(doctor.examine(Machine()), device, comparisons, training)


def document(verification: Verification) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    return {
        "passed": verification.passed,
        "device": verification.device,
        "machine": [asdict(finding) for finding in verification.machine],
        "versions": {
            "tpfuse": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "comparisons": [asdict(x) | {"passed": x.passed} for x in verification.comparisons],
        "training": [asdict(x) | {"passed": x.passed} for x in verification.training],
    }


def _table(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Return the lines of a table. Its first row names the columns, of which all but the first `texts` hold numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [cell.ljust(width) if place < texts else cell.rjust(width) for place, (cell, width) in enumerate(cells)]
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    return ["  ".join(line).rstrip() for line in lines]


def report(verification: Verification) -> str:
    """Return what the machine can do, the tables, the reasons of failures, and the verdict."""
    compared, runs = verification.comparisons, verification.training
    lines = [doctor.report(verification.machine), ""]
    if compared:
        lines += _table([("operator", "case", "dtype", "error", "bound"), *map(_row, compared)], texts=3)
        lines.append(
            "error: the largest difference from float64, of the output and all gradients; bound: what the same dtype in"
            " plain torch allows, and 0 where results are exact"
        )
    if runs:
        names = ("loss 1", "loss 2", "largest difference of weights", "norm", "allowed", "ms a step")
        lines += ["", *_table([("two training steps of GPT tiny, tp 2", *names), *map(_training_row, runs)], texts=1)]
        lines.append(
            "difference: of a weight from float64 on one rank; norm: the 2-norm of all differences; allowed: what the"
            " norm may be"
        )
    for x in compared:
        if not x.passed:
            error = "not finite" if x.error is None else f"{x.error:.3e}"
            reason = x.failure or f"{x.tensor}: error {error}, allowed {x.bound:.3e}"
            lines.append(f"FAILED {x.operator}, {x.case}, {x.dtype}: {reason}")
    failed = [run for run in runs if not run.passed]
    lines += [f"FAILED training, {run.name}: {run.failure or 'weights differ too much'}" for run in failed]
    return "\n".join([*lines, "", f"compared on {verification.device}", verdict(verification)])


def _row(x: Comparison) -> tuple[str, ...]:
    error = "FAILED" if x.failure else "not finite" if x.error is None else f"{x.error:.1e}"
    return x.operator, x.case, x.dtype, error, f"{x.bound:.1e}" if x.tensor else ""


def _training_row(x: TrainingRun) -> tuple[str, ...]:
    if not x.losses:
        return x.name, "FAILED", *[""] * 5
    losses = (f"{loss:.6f}" for loss in x.losses)
    far = (f"{value:.1e}" for value in (x.difference, x.distance, x.allowed))
    return x.name, *losses, *far, f"{x.seconds * 1e3:.0f}"


def verdict(verification: Verification) -> str:
    """Return the last line of the report: how many of all checks have passed."""
    checks = {
        "cases": [x.passed for x in verification.comparisons],
        "training runs": [x.passed for x in verification.training],
    }
    results = [
        f"{'all' if all(passed) else f'{sum(passed)} of'} {len(passed)} {what} are within their bounds"
        for what, passed in checks.items()
        if passed
    ]
    return f"{'passed' if verification.passed else 'FAILED'}: {', '.join(results)}"


def run(operators: Sequence[str], as_json: bool) -> int:
    """Run the command. Return 0 if every check has passed, else 1."""
    operators = chosen(operators)
    if as_json:
        verification = verify(operators)
        print(json.dumps(document(verification)))
    else:
        print(f"comparing {', '.join(operators)}: without a GPU about half a minute each on two cores\n", flush=True)
        verification = verify(operators)
        print(report(verification))
    return int(not verification.passed)
