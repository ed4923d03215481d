"""Run pytest again and again in forks of one process, which has imported the slow modules that no fault can change.

`run.py` starts this file as a program, in a copy of the checkout. It reads a line of JSON for each run,
{"arguments": of pytest, "limit": seconds, "output": path}, and answers with {"status": pytest's or null, "seconds"}.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from time import monotonic, sleep

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, as tests/conftest.py has it

import pytest
import triton.language
import triton.runtime.interpreter  # noqa: F401


def _child(arguments: list[str], output: Path) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.insert(0, str(Path.cwd()))
    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(int(status))


def _awaited(process: int, limit: float) -> int | None:
    """Return the exit status of a child, or None if it did not end in time; in both cases end all its processes."""
    deadline = monotonic() + limit
    status = None
    while monotonic() < deadline:
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # ends ranks that a test has left running
    if status is None:
        os.waitpid(process, 0)
    return status


def main() -> None:
    """Serve until the standard input ends."""
    imported = any(name.partition(".")[0] == "tpfuse" for name in sys.modules)
    assert not imported, "tpfuse is imported before the fork, so that no fault could be planted in it"
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin = monotonic()
        process = os.fork()
        if process == 0:
            _child(job["arguments"], Path(job["output"]))
        status = _awaited(process, job["limit"])
        print(json.dumps({"status": status, "seconds": monotonic() - begin}), flush=True)


if __name__ == "__main__":
    main()
