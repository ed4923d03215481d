"""Flight records: what a rank that has waited in vain writes about all ranks of its group, for `tpfuse hang`."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.settings import settings
from tpfuse.comm.stacks import stacks_of, state_of


@dataclass(frozen=True)
class Process:
    """The process of a rank, on this host. operations: the rank's last ones, as far as they are recorded."""

    rank: int
    pid: int
    ended: bool
    operations: Sequence[dict[str, object]] = ()


def write_record(error: BaseException, processes: Callable[[], Sequence[Process]]) -> None:
    """Write a record as JSON into the folder of the settings, if `error` says that this rank has waited in vain.

    The record has the Python stacks of the ranks that offer them too (`tpfuse.comm.stacks`). A disk that fails must not
    hide the error, so a failure to write is only noted on it.
    """
    folder = settings().flight_folder
    if folder is None or not isinstance(error, PeerTimeout) or error.waited is None:
        return
    found = processes()
    stacks = stacks_of(folder, [process.pid for process in found])
    record: dict[str, Any] = {
        "error": str(error),
        "op": error.op,
        "step": error.step,
        "rank": error.rank,
        "missing": error.peer,
        "waited_s": round(error.waited, 3),
        "written_ns": time.time_ns(),
        "ranks": [
            {
                "rank": process.rank,
                "pid": process.pid,
                "ended": process.ended,
                "state": state_of(process.pid),
                "stack": stacks.get(process.pid, ""),
                "operations": process.operations,
            }
            for process in found
        ],
    }
    try:
        (folder / f"flight_record_rank{error.rank}.json").write_text(json.dumps(record, indent=1))
    except OSError as disk:
        error.add_note(f"the flight record could not be written: {disk}")
