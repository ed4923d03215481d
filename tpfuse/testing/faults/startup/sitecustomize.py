"""Python runs this module at the start of every process of a test run with a fault, ranks and commands included.

The checkout that TPFUSE_CHECKOUT names is imported, even if another version of tpfuse is installed. If TPFUSE_RECORD
names a folder, calls of the checkout's functions are recorded there; see `record.py`. The folder has the files

    current         the number of the running test, as 8 bytes
    calls-PID       a line "test<TAB>file<TAB>function" for the first call of each function by the process in each test
"""

import contextlib
import mmap
import os
import sys
from os import write as _os_write  # a name of its own, since tests replace os.write
from pathlib import Path

_root = os.environ.get("TPFUSE_CHECKOUT", "")
_sources = tuple(f"{_root}/{name}/" for name in ("tpfuse", "kernels", "models"))
if _root:
    # With an editable installation `tpfuse.kernels` would be that of the installed checkout.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]


class _Recorder:
    """Writes each function of the checkout that is called, once for each test."""

    def __init__(self, folder: str) -> None:
        self._folder, self._file, self._process = Path(folder), None, 0
        self._seen = set()
        with (self._folder / "current").open("r+b") as file:
            self._current = mmap.mmap(file.fileno(), 8)
        tool = sys.monitoring.PROFILER_ID
        sys.monitoring.use_tool_id(tool, "tpfuse")
        sys.monitoring.register_callback(tool, sys.monitoring.events.PY_START, self._called)
        sys.monitoring.set_events(tool, sys.monitoring.events.PY_START)
        os.register_at_fork(after_in_child=sys.monitoring.restart_events)

    def _called(self, code, offset):
        if not code.co_filename.startswith(_sources):
            return sys.monitoring.DISABLE
        test = self._current[:8]
        if code.co_name == "_find" and code.co_filename.endswith("testing/ranks.py"):
            # A rank of a pool begins a function, perhaps for another test than before.
            if (test, "_find") not in self._seen:
                self._seen = {(test, "_find")}
                sys.monitoring.restart_events()
            return None
        function = (test, code.co_filename, code.co_qualname)
        if function not in self._seen:
            self._seen.add(function)
            with contextlib.suppress(OSError):  # so that a test which limits the sizes of files continues
                self._write(function)
        return sys.monitoring.DISABLE

    def _write(self, function):
        if self._process != os.getpid():
            self._process = os.getpid()
            path = self._folder / f"calls-{self._process}"
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        test, file, name = function
        line = f"{int.from_bytes(test, 'little')}\t{os.path.relpath(file, _root)}\t{name}\n"
        _os_write(self._file, line.encode())


if _root and os.environ.get("TPFUSE_RECORD"):
    with contextlib.suppress(OSError, ValueError):
        _Recorder(os.environ["TPFUSE_RECORD"])
