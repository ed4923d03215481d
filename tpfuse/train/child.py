"""The first instructions of a rank that `tpfuse.train.launch` starts.

This module imports nothing that takes time, so that a rank ends with its parent while it still imports torch.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tpfuse.errors import RunError, UserError
from tpfuse.train.messages import accept_all_texts


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch, and what needs it, without Python's search for garbage: a quarter of the time of a start.

    Modules stay, so the search leaves them out afterwards too. Ctrl-C ends the process at once. KeyboardInterrupt can
    be lost in a callback of the import system; and in one start of eight it ended the process by SIGINT, not by 130.
    """
    if "torch" in sys.modules:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    interruptible = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, interrupted)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(*_: object) -> None:
    """Say that Ctrl-C has ended this process, and end it at once."""
    os.write(2, b"tpfuse: interrupted\n")
    os._exit(130)


def begin(parent: int, reports: Connection, work: bytes) -> None:
    """Run the pickled (function, arguments) of `work` as a rank of process `parent`, and end this process.

    The exit status is the value that the function returns. A RunError or UserError is sent to the parent, which prints
    for all ranks why the run has ended. Any other exception is printed here.
    """
    _end_with(parent, signal.SIGKILL)  # nothing is lost before training has begun
    accept_all_texts()
    status = 1
    try:
        with quick_imports():
            function, arguments = pickle.loads(work)
        _end_with(parent, signal.SIGTERM)  # from now on the rank saves before it ends
        status = function(*arguments)
    except (RunError, UserError) as error:
        status = error.status
        with contextlib.suppress(OSError):  # the parent may have ended
            reports.send(error)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # All output is written and the process group is destroyed, so os._exit loses nothing. It skips the unloading of C++
    # libraries, which could change the exit status.
    os._exit(status)


def _end_with(parent: int, number: signal.Signals) -> None:
    """Ask Linux to send this process signal `number` when process `parent` ends; exit now if that has happened."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
