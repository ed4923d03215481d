"""Fixtures: a small text, the commands in this process, and a finished run."""

import contextlib
import io
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Commands
from tpfuse.cli import run
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


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text of about 6,000 characters that a model can learn, and return its path."""
    words = "the cat sat on a mat and saw that the dog was at the door of the house".split()
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(1800)))
    return path


def _flags(text: Path) -> list[str]:
    return (
        f"--data.path {text} --model.n-layer 2 --model.n-embd 32 --model.n-head 4 --model.n-positions 16"
        " --train.steps 12 --train.batch 8 --train.eval-every 6 --train.eval-batches 2 --train.log-every 3"
        " --train.save-every 5"
    ).split()


@pytest.fixture
def flags(text: Path) -> list[str]:
    """Return the flags of a tiny run on that text. The test adds `--out`."""
    return _flags(text)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Make a finished run, whose folder the tests must not change. The file "said" beside it has what it printed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(["train", *_flags(text), "--data.tokenizer", "chars", "--out", str(out)]) == 0
    (out.parent / "said").write_text(said.getvalue())
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, which the test may change."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def commands(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(run, flags, tmp_path / "run", capfd)
