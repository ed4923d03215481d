"""A small text and the flags of a run that takes moments."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpfuse.train import hardware
from tpfuse.train.launch import STOP_SIGNALS


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not ask how fast this machine is."""
    monkeypatch.setattr(hardware, "PROBE_SECONDS", 0.01)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Puts the signal handlers back that a run in this process replaces."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 6,000 characters that can be learned."""
    words = "the cat sat on a mat and saw that the dog was at the door of the house".split()
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(1800)))
    return path


@pytest.fixture
def flags(text: Path) -> list[str]:
    """Flags of a tiny run on that text; `--out` is left to the test."""
    return (
        f"--data.path {text} --model.n-layer 2 --model.n-embd 32 --model.n-head 4 --model.n-positions 16"
        " --train.steps 12 --train.batch 8 --train.eval-every 6 --train.eval-batches 2 --train.log-every 3"
        " --train.save-every 5"
    ).split()
