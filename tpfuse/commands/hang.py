"""`tpfuse hang` says in words who waited for whom, from the flight records that the ranks of a run have written.

Every rank that gives up waiting writes a record (`tpfuse.comm.watchdog`): the last operations of all ranks of its
group, the state of their processes, and their Python stacks.
"""

from pathlib import Path
from typing import Any

from tpfuse.checkpoint.untrusted import Unreadable, read_json, reading
from tpfuse.errors import UserError

_ENTRY = {"rank": int, "pid": int, "ended": bool, "state": str, "stack": str, "operations": list}
_OPERATION = {"number": int, "operation": str, "begun_ns": int, "ended_ns": int}
_SCHEMA = {
    "op": str, "step": int, "rank": int, "waited_s": float, "written_ns": int,
    "ranks": [_ENTRY | {"operations": [_OPERATION]}],
}  # fmt: skip
# The record of one rank: missing is the rank for which it waited; None if no single rank was late.
Record = dict[str, Any]
_TOGETHER = 300 * 10**9  # ns; records that are older than the newest by more belong to an earlier failure


def read_records(run: Path) -> list[Record]:
    """Return the records of a run's last failure, in rank order, each with its ranks by number. Raise UserError."""
    records = []
    for path in run.glob("flight_record_rank*.json"):
        with reading(path):
            found = read_json(path, _SCHEMA)
            missing = found.setdefault("missing", None)
            if not isinstance(missing, int | None):
                raise Unreadable(f"missing is {missing!r}: expected the number of a rank")
        records.append(found | {"ranks": {entry["rank"]: entry for entry in found["ranks"]}})
    if not records:
        raise UserError(f"{run} has no flight records: no rank of that run has waited in vain")
    newest = max(record["written_ns"] for record in records)
    return sorted((r for r in records if newest - r["written_ns"] < _TOGETHER), key=lambda record: record["rank"])


def hang(run: Path) -> str:
    """Return the explanation. Raise UserError for a run without records."""
    records = read_records(run)
    in_time = [record for record in records if record["missing"] != record["rank"]]
    waiting = {record["rank"] for record in in_time}
    causes = [record for record in in_time if record["missing"] not in waiting] or in_time or records
    # A rank that was told to stop waiting has waited less. One that was stopped may have written when it went on.
    cause = max(causes, key=lambda record: (record["missing"] is not None, bool(_suspects(record)), record["waited_s"]))
    lines = [_sentence(cause, [record["rank"] for record in in_time if record["missing"] == cause["missing"]])]
    lines += [_described(cause, entry) for entry in _suspects(cause)]
    difference = _difference(cause)
    if difference:
        lines.append(difference)
    known: dict[int, dict[str, Any]] = {}
    for record in records:
        known |= {rank: entry for rank, entry in record["ranks"].items() if rank not in known or entry["stack"]}
    for rank, entry in sorted(known.items()):
        lines += ["", f"Python stack of rank {rank}:", *_innermost(entry["stack"], entry["state"])]
    return "\n".join(lines)


def _sentence(record: Record, waiting: list[int]) -> str:
    where = record["op"] + (f" of step {record['step']}" if record["step"] >= 0 else "")
    if record["missing"] is None:
        return f"In {where}, rank {record['rank']} waited {record['waited_s']:.1f} s, but no single rank was late."
    if record["missing"] == record["rank"]:
        return f"In {where}, rank {record['rank']} came too late: the other ranks had stopped waiting for it."
    ranks = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
    return f"In {where}, {ranks} waited {record['waited_s']:.1f} s for rank {record['missing']}."


def _suspects(record: Record) -> list[dict[str, Any]]:
    """Return the entry of the missing rank or, if no single rank was late, of those that had ended or were stopped."""
    if record["missing"] is not None:
        return [record["ranks"][record["missing"]]] if record["missing"] in record["ranks"] else []
    return [entry for entry in record["ranks"].values() if entry["ended"] or entry["state"].startswith("T")]


def _described(record: Record, missing: dict[str, Any]) -> str:
    """Return what a missing rank did."""
    process = f"Rank {missing['rank']} (process {missing['pid']})"
    if missing["ended"]:
        return f"{process} had ended: read its own error."
    stopped = " was stopped by a signal, and" if missing["state"].startswith("T") else ""
    if not missing["operations"]:
        return f"{process}{stopped} has no recorded operation."
    last = missing["operations"][-1]
    if last["ended_ns"]:
        seconds = (record["written_ns"] - last["ended_ns"]) / 1e9
        return f"{process}{stopped} had ended its last operation, {last['operation']}, {seconds:.1f} s before."
    seconds = (record["written_ns"] - last["begun_ns"]) / 1e9
    return f"{process}{stopped} had begun {last['operation']} {seconds:.1f} s before and had not ended it."


def _difference(record: Record) -> str:
    """Return in words the first operation that differs between two ranks; "" if there is none.

    Messages, with numbers below 0, are not compared: every rank has its own.
    """
    texts: dict[int, dict[int, str]] = {}
    for rank, entry in record["ranks"].items():
        for operation in (operation for operation in entry["operations"] if operation["number"] > 0):
            texts.setdefault(operation["number"], {})[rank] = operation["operation"]
    for number, by_rank in sorted(texts.items()):
        (first, text), *others = sorted(by_rank.items())
        for rank, other in others:
            if other != text:
                return (
                    f"Operation {number} was {text} on rank {first}, but {other} on rank {rank}: the ranks took"
                    " different branches of the program."
                )
    return ""


def _innermost(stack: str, state: str) -> list[str]:
    """Return the lines of the thread that ran, the innermost call first."""
    if not stack:
        return [f"  unknown: the process did not answer (its state was {state or 'unknown'})"]
    lines = stack.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), 0)
    ending = (index for index, line in enumerate(lines) if index > start and not line.startswith("  "))
    return lines[start + 1 : next(ending, len(lines))]
