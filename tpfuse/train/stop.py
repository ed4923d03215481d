"""Ctrl-C and SIGTERM: remembered, and acted on between two steps by all ranks together."""

import signal
import sys
from types import FrameType

from tpfuse.train.launch import STOP_SIGNALS


class StopRequest:
    """Whether this process was asked to stop. Installs its handlers when made, on the main thread.

    insistent: a second signal ends the process at once, for a rank without a parent that would do so.
    """

    def __init__(self, *, insistent: bool) -> None:
        self._wanted, self._insistent = False, insistent
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held back while this rank was starting

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._wanted and self._insistent:
            sys.exit(128 + number)
        self._wanted = True
        if not self._insistent:  # the parent repeats itself; a signal more would interrupt calls inside a collective
            # Held back, not ignored: of one that has come already, Python would say that it can call nothing for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def __call__(self) -> bool:
        return self._wanted
