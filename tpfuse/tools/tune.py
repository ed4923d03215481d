"""`tpfuse tune`: measure tile sizes on this machine's GPU and write them into kernels/configurations.toml.

    tpfuse tune gemm attention_forward --minutes 20

For each row of the table that a trial's launcher chooses, the candidates of the row's search space are compiled,
compared with float64 as the tests do, and timed. A candidate that spills, or that fails the gate of the tests in
another way, is skipped. The candidate with the best geometric mean over the row's trials replaces the row; it states
its speed, and where and when it was measured. Rows are written one by one, so that a run that ends early keeps the rows
that it has finished.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby, takewhile
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import triton
import triton.testing

from tpfuse.checkpoint.durable import replace_file
from tpfuse.errors import UserError, check_at_least, refusing
from tpfuse.kernels import configurations, launch
from tpfuse.kernels.configurations import Configuration, override, read_table, rows_of
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.tools.compilation import compile_jobs
from tpfuse.tools.gate import violations
from tpfuse.tools.operator import Trial
from tpfuse.tools.operators import trials
from tpfuse.tools.recorded import Job, source_of
from tpfuse.tools.search import Inspect, Search, Tuner, brief, one_line
from tpfuse.tools.search_space import SPACES, Step


def tune(
    operators: Sequence[str],
    tuner: Tuner,
    all_trials: Sequence[Trial],
    spaces: dict[str, tuple[Step, ...]],
    out: Path,
) -> list[Configuration]:
    """Tune the rows of `operators` for the tuner's device, write `out`, and return the rows that were measured.

    `out` becomes a copy of the installed table with these rows; if it exists, it keeps its other rows. Raise UserError
    if it is not a table of the rows to tune.
    """
    best_rows: list[Configuration] = []
    rows = tuned_rows(operators, tuner, all_trials)
    with refusing(f"cannot use the table {out}: ", ": give another file with --out"):
        text = (out if out.exists() else configurations.TABLE).read_text(encoding="utf-8")
        with_rows(text, [row.row for row in rows])
    for row in rows:
        if not row.fitting or monotonic() > tuner.deadline:
            tuner.say(f"{row.name}: left as it is, {'no time left' if row.fitting else 'no trial chooses it'}")
            continue
        best = row.best(tuner, spaces)
        if best is None:
            continue
        best_rows.append(best)
        replace_file(out, with_rows(text, best_rows))
    configurations.forget()
    return best_rows


def with_rows(text: str, rows: Iterable[Configuration]) -> str:
    """Return the text of a table in which `rows` replace the rows with the same keys. The comment at its head stays.

    Raise ValueError for a row whose key the table does not have.
    """
    left = {row.key: row for row in rows}
    table = [left.pop(row.key, row) for row in rows_of(text, "the table")]
    if left:
        raise ValueError(f"the table has no row for {', '.join(map(str, left))}")
    lines = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    for operator, its_rows in groupby(table, lambda row: row.operator):
        lines += ["", f"{operator} = [", *_lines(its_rows), "]"]
    return "\n".join(lines).lstrip() + "\n"


def _lines(rows: Iterable[Configuration]) -> Iterator[str]:
    """Yield the lines of an operator's rows. Neighbours that are equal but for family and bits share a line."""
    for content, equal in groupby(rows, _content):
        widths = ((family, [row.bits for row in same]) for family, same in groupby(equal, lambda row: row.family))
        for bits, families in groupby(widths, lambda entry: entry[1]):
            yield f"    {{families = {_toml([family for family, _ in families])}, bits = {bits}, {content}}},"


def _content(row: Configuration) -> str:
    fields: dict[str, Any] = {"at_most": row.at_most} if row.at_most else {}
    fields |= {"blocks": row.blocks, "num_warps": row.num_warps, "num_stages": row.num_stages}
    return ", ".join(f"{name} = {_toml(value)}" for name, value in (fields | {"measured": row.measured}).items())


def _toml(value: Any) -> str:
    """Return a TOML value; strings, numbers and booleans are written as in JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(x)}" for key, x in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class TunedRow:
    """A row of the table. fitting: the trials that choose it."""

    row: Configuration
    fitting: list[Trial]

    @property
    def name(self) -> str:
        """Return the row's name in messages."""
        limits = "".join(f", {key} <= {x}" for key, x in self.row.at_most.items())
        return f"{self.row.operator}, {self.row.bits} bits{limits}"

    def best(self, tuner: Tuner, spaces: dict[str, tuple[Step, ...]]) -> Configuration | None:
        """Return the best row to replace this one, or None if no row works."""
        tuner.say(f"{self.name}: {', '.join(trial.name for trial in self.fitting)}")
        best = Search(tuner, self.fitting).best(self.row, spaces[self.row.operator])
        if best is not None:
            tuner.say(f"  best: {brief(best)}: {best.measured}")
        return best


def tuned_rows(operators: Sequence[str], tuner: Tuner, all_trials: Sequence[Trial]) -> list[TunedRow]:
    """Return the rows of these operators for the tuner's device."""
    rows, family = read_table(configurations.TABLE), launch.family(tuner.device)
    family_rows = [row for row in rows if row.family == family and row.operator in operators]
    chosen = _chosen_rows(family_rows, all_trials, tuner)
    return [TunedRow(row, [trial for trial, served in chosen if row in served]) for row in family_rows]


def _chosen_rows(
    rows: Sequence[Configuration], all_trials: Sequence[Trial], tuner: Tuner
) -> list[tuple[Trial, list[Configuration]]]:
    """Return for each trial the rows that its launcher chooses. No kernel runs if launches can be recorded.

    A trial that fails is left out.
    """
    family, chosen = launch.family(tuner.device), []
    recorded = family in launch.FAMILIES
    device = torch.device("meta") if recorded else tuner.device
    for trial in all_trials if rows else []:
        try:
            with override(*rows) as served, launch.recording(family) if recorded else contextlib.nullcontext():
                trial.run(**trial.shape.drawn(device, tuner.dtype))
            chosen.append((trial, list(served)))
        except Exception as error:
            tuner.say(f"{trial.name}: left out, {one_line(error)}")
    return chosen


def inspect_compiled(dtype: torch.dtype, family: str) -> Inspect:
    """Return a function that compiles the launches of candidates on all cores and applies the tests' gate to them."""

    def inspect(tried: Sequence[Configuration], fitting: Sequence[Trial]) -> list[str]:
        inputs = [trial.shape.drawn(torch.device("meta"), dtype) for trial in fitting]
        jobs: dict[object, Job] = {}
        needed: list[set[object]] = []
        for candidate in tried:
            with override(candidate), launch.recording(family) as recording:
                for trial, given in zip(fitting, inputs, strict=True):
                    trial.run(**given)
            keys: set[object] = set()
            for x in recording.launches:
                job = Job(candidate.operator, family, str(dtype), source_of(x, family), x.num_warps, x.num_stages)
                key = job.source.hash(), x.num_warps, x.num_stages
                jobs.setdefault(key, job)
                keys.add(key)
            needed.append(keys)
        results = dict(compile_jobs(list(jobs.values())))
        reasons = {key: next(violations(results[index]), "").partition(": ")[2] for index, key in enumerate(jobs)}
        return [next(filter(None, (reasons[key] for key in keys)), "") for keys in needed]

    return inspect


def measure_on_device(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, over some 100 ms of calls; the L2 cache is emptied before each call."""
    return float(triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median")) / 1e3


def run(operators: Sequence[str], out: Path | None, minutes: float | None) -> int:
    """Run the command.

    Raise UserError if there is no GPU, if an operator has no search space, or if `out` cannot be written.
    """
    unknown = [name for name in operators if name not in SPACES]
    if unknown:
        raise UserError(f"no search space for {', '.join(unknown)}: expected operators of {', '.join(SPACES)}")
    check_at_least({"minutes": (minutes, 0)})
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA GPU here to measure on")
    if INTERPRETED:
        raise UserError("TRITON_INTERPRET=1 is set: kernels would be interpreted, not run")
    out = out or configurations.TABLE
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"cannot write {out}: give another file with --out")
    device = torch.device("cuda", torch.cuda.current_device())
    deadline = float("inf") if minutes is None else monotonic() + 60 * minutes
    tuner = tuner_of(device, lambda line: print(line, flush=True), deadline)
    rows = tune(operators or list(SPACES), tuner, trials(), SPACES, out)
    print(f"{len(rows)} rows measured and written to {out}")
    return 0


def tuner_of(device: torch.device, say: Callable[[str], None], deadline: float) -> Tuner:
    """Return a tuner that measures in bfloat16 on a GPU until the deadline, in seconds of time.monotonic."""
    return Tuner(
        device=device,
        dtype=torch.bfloat16,
        inspect=inspect_compiled(torch.bfloat16, launch.family(device)),
        measure=measure_on_device,
        say=say,
        place=f"{torch.cuda.get_device_name(device)}, {date.today().isoformat()}, triton {triton.__version__}",
        deadline=deadline,
    )
