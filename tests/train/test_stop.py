"""Signals that ask a run to stop."""

import signal
import threading

import pytest

from tpfuse.train.launch import STOP_SIGNALS
from tpfuse.train.stop import StopRequest


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_two_signals_at_once_are_one_request() -> None:
    """Ctrl-C sends SIGINT to all ranks while their parent passes SIGTERM on."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for number in STOP_SIGNALS:
            signal.pthread_kill(threading.get_ident(), number)  # another thread would receive it at once
        stop = StopRequest(insistent=False)  # this unblocks both signals
        assert stop()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
