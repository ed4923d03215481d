"""Remember Ctrl-C and SIGTERM. All ranks act on them together, between two steps."""

import signal
import sys
from types import FrameType

from tpfuse.train.launch import STOP_SIGNALS


class StopRequest:
    """Tell whether this process was asked to stop. The constructor installs the handlers, on the main thread.

    insistent: whether a second signal ends the process at once, for a rank without a parent that would end it.
    """

    def __init__(self, *, insistent: bool) -> None:
        self._wanted, self._insistent = False, insistent
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were blocked while this rank was starting

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._wanted and self._insistent:
            sys.exit(128 + number)
        self._wanted = True
        if not self._insistent:  # the parent repeats the signal, which would interrupt calls inside a collective
            # The signals are blocked and not ignored: for a pending signal, Python would report that it has no handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def __call__(self) -> bool:
        return self._wanted
