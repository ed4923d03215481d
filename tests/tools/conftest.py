"""Hooks that compile while other tests run, on the cores that these leave idle."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compilations import compiling

_COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()


def _wants_all_kernels(item: pytest.Item) -> bool:
    return item.path.name == "test_compilation.py"


def _give_way() -> None:
    """Give this process only the processor time that no other process uses.

    Linux first divides the processor among sessions (man 7 sched, autogroups). A process's own niceness therefore
    counts within its session alone, and a command that a test starts in a session of its own would have to share the
    processor with this process.
    """
    os.nice(19)
    with contextlib.suppress(OSError):  # there are no autogroups
        Path("/proc/self/autogroup").write_text("19")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_wants_all_kernels, session.items)) and not session.config.option.collectonly:
        session.config.stash[_COMPILING] = subprocess.Popen(
            [sys.executable, "-m", "tpfuse.tools.compilation"],
            env=compiling(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_give_way,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    if _COMPILING in config.stash:
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            os.killpg(config.stash[_COMPILING].pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def compiled_beside(request: pytest.FixtureRequest) -> None:
    """Wait until the results of all kernels are stored (`tpfuse.tools.compilation`)."""
    request.config.stash[_COMPILING].wait()
