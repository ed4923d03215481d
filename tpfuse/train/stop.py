"""Ctrl-C and SIGTERM: remembered, and acted on between two steps by all ranks together."""

import signal
from types import FrameType

from tpfuse.train.launch import STOP_SIGNALS


class StopRequest:
    """Whether this process was asked to stop. Installs its handlers when made, on the main thread."""

    def __init__(self) -> None:
        self._wanted = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True

    def __call__(self) -> bool:
        return self._wanted
