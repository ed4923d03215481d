"""Fixtures of all tests that run commands in this process."""

import signal
from collections.abc import Iterator

import pytest

from tpfuse.switches import chosen_implementation, chosen_kernels, use
from tpfuse.train import hardware
from tpfuse.train.launch import STOP_SIGNALS


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the peak rate, since these tests do not measure the speed of this machine."""
    monkeypatch.setattr(hardware, "PROBE_SECONDS", 0.01)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signal handlers, which a run in this process replaces."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """Restore the kernels and the implementation, which a run in this process chooses."""
    with use(kernels=chosen_kernels()), use(implementation=chosen_implementation()):
        yield
