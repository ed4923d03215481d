"""The first half hour on a GPU: check every result, measure the speed, and tune.

    python -m benchmarks.first_contact --out FOLDER --minutes 25
    python -m benchmarks.first_contact --out FOLDER --steps timings --operators gemm attention
    python -m benchmarks.first_contact --out FOLDER --rehearse      # all of it on a CPU, interpreted, with tiny shapes

`benchmarks.contact_steps.steps` has the steps in their order, and docs/first_node.md says what each outcome means.

Each step is a process of its own with a deadline, and each row is in FOLDER/rows.jsonl as soon as it is known
(`benchmarks.apart`). A second call with the same FOLDER continues where the first one ended. FOLDER/first_contact.json
is the summary: device, versions, commit and command, failures, figures, and the steps that are left. What was timed on
a GPU is also in gpu-MACHINE.json, in build/results, or with --keep in benchmarks/results, which git tracks; its table
is in build/results/gpu-MACHINE.md.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.apart import Row, failed, finished, read, run_steps
from benchmarks.contact_steps import TIMED, Plan, kept_ceilings, steps
from benchmarks.figures import FIGURES, figures_table
from benchmarks.harness import OURS, Parser, results, table, unable
from tpfuse.comm.host import replace_file
from tpfuse.kernels.interpreter import interpreter_problem
from tpfuse.tools import operators as cases

SHORT = ("speed_124m", "epilogues", "gather_scatter")  # the steps that a GPU of some minutes runs first
TIMINGS = (*SHORT, "timings", "torch.compile", "more timings")


def measurements(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of benchmarks for `benchmarks.figures`: each candidate's last of a case, and the failures."""
    last: dict[tuple[str, ...], Row] = {}
    for row in rows:
        group, _, operator = row["step"].partition(": ")
        if group not in TIMINGS or "row" not in row:
            continue
        for measured in row.get("measurements", ()):
            last[tuple(measured[key] for key in ("operator", "case", "mode", "candidate"))] = measured
        if "error" in row and "measurements" not in row:
            operator = operator or group
            identity = {"operator": operator, "case": row["row"], "asked": group != "more timings", "mode": ""}
            last[operator, row["row"], "", OURS] = identity | {"candidate": OURS, "error": row["error"]}
    return list(last.values())


def summary(folder: Path, names: Sequence[str], rehearsed: bool) -> dict[str, Any]:
    """Return the content of first_contact.json."""
    rows = read(folder)
    of_steps: dict[str, list[Row]] = {row["step"]: [] for row in rows}
    for row in rows:
        of_steps[row["step"]] += [row] if "row" in row else []
    ceilings, done = kept_ceilings(rows), finished(folder)
    measured = [] if rehearsed else measurements(rows)  # times of the interpreter have no meaning
    return {
        "device": (of_steps.get("device") or [None])[-1],
        "rehearsed": rehearsed,
        "figures": [figure.outcome(measured, ceilings.copy if ceilings else float("nan")) for figure in FIGURES],
        "steps": {name: {"rows": len(x), "failed": sum(map(failed, x))} for name, x in of_steps.items()},
        "failed": [row for row in rows if failed(row)],
        "left": [name for name in names if name not in done],
    }


def write_results(document: dict[str, Any], measured: Sequence[Row], keep: bool) -> Path:
    """Write gpu-MACHINE.json: what was measured, and the figures of the summary. Return its folder.

    keep: whether it is to be committed. A file is replaced only if all its cases were measured now. Its table,
    gpu-MACHINE.md, is never committed.
    """
    head = {key: x for key, x in document["device"].items() if key not in ("step", "row", "seconds")}
    name = f"gpu-{re.sub(r'[^a-z0-9]+', '-', head['machine'].lower()).strip('-')}"
    text = json.dumps(head | {"figures": document["figures"]}, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(row)}" for row in measured)
    folder = results(keep)
    if keep and (folder / f"{name}.json").exists():
        committed = json.loads((folder / f"{name}.json").read_text())["rows"]
        if {(row["operator"], row["case"]) for row in committed} - {(x["operator"], x["case"]) for x in measured}:
            folder = results(keep=False)
    replace_file(folder / f"{name}.json", f'{text},\n "rows": [\n{rows}\n ]\n}}\n')
    lines = [
        f"# tpfuse's operators beside their peers on {head['machine']}, {head['date']}",
        ", ".join(f"{key} {head.get(key)}" for key in ("commit", "torch", "cuda", "driver", "triton")),
        figures_table(document["figures"]),
        table(measured),
    ]
    replace_file(results(keep=False) / f"{name}.md", "\n\n".join(lines) + "\n")
    return folder


def line(row: Row) -> str:
    """Return the line that is printed for a row."""
    if row.get("finished"):
        return f"{row['step']}: finished, {row['seconds']} s"
    verdict = "FAILED" if failed(row) else row.get("outcome", row.get("note", "ok"))
    reason = f": {row['error'].strip().splitlines()[-1][:200]}" if row.get("error") else ""
    seconds = f", {row['seconds']:.1f} s" if "seconds" in row else ""
    return f"{row['step']} | {row['row']} | {verdict}{seconds}{reason}"


def _arguments() -> argparse.Namespace:
    operators = list(dict.fromkeys([*cases.names(), *TIMED]))
    groups = list(steps(Plan(Path(), True, 0, ())))
    parser = Parser(None, "python -m benchmarks.first_contact")
    parser.option("--out", Path, "folder to store rows in, and to continue from the rows that it has")
    parser.option("--minutes", 25.0, "end this call after this number of minutes; another call continues")
    parser.add_argument(
        "--steps", nargs="+", choices=groups, metavar="STEP", help=f"run only device and these of {', '.join(groups)}"
    )
    parser.add_argument(
        "--operators", nargs="+", choices=operators, metavar="OPERATOR", help="run only these operators"
    )
    parser.option("--rehearse", False, "interpret tiny shapes on a CPU, to check that the program works")
    parser.option("--seed", int(torch.seed() % 2**31), "seed of the inputs (default: a new one)")
    arguments = parser.parse_args()
    arguments.operators = arguments.operators or operators
    return arguments


def main() -> int:
    """Run the steps; return 1 where something has failed in this folder, and 2 where there is no GPU."""
    arguments = _arguments()
    error: str | None
    if arguments.rehearse:
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # for the processes of the steps
        error = interpreter_problem() and f"benchmarks.first_contact: error: {interpreter_problem()}"
    else:
        error = unable("benchmarks.first_contact")
    if error:
        print(error, file=sys.stderr)
        return 2
    deadline = monotonic() + 60 * arguments.minutes
    operators = tuple(arguments.operators)
    plan = Plan(arguments.out.resolve(), arguments.rehearse, arguments.seed, operators, arguments.keep)
    by_group = steps(plan)
    groups = {"device", *(arguments.steps or by_group)}
    selected = [step for group, of_group in by_group.items() if group in groups for step in of_group]
    names = [step.name for step in selected]

    def say(row: Row) -> None:
        print(line(row), flush=True)
        if row.get("finished"):
            keep()

    def keep() -> dict[str, Any]:
        document = summary(plan.out, names, plan.rehearse)
        (plan.out / "first_contact.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
        measured = [] if plan.rehearse else measurements(read(plan.out))
        if measured and "machine" in (document["device"] or {}):
            document["kept"] = write_results(document, measured, plan.keep)
        return document

    left = run_steps(selected, plan.out, deadline, say)
    document = keep()
    rows = measurements(read(plan.out))
    print("", table(rows) if rows else "nothing was timed", "", figures_table(document["figures"]), "", sep="\n")
    for row in document["failed"]:
        print(f"FAILED {row['step']}, {row['row']}:", *row.get("error", "wrong").splitlines(), sep="\n    ")
    print(f"left for another call: {', '.join(left)}" if left else "nothing is left")
    print(f"kept in {arguments.out}" + (f", and the times in {document['kept']}" if "kept" in document else ""))
    return int(bool(document["failed"]))


if __name__ == "__main__":
    sys.exit(main())
