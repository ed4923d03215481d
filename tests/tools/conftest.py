"""The compiler works while other tests run, on the cores that they leave; the tests of its results come last."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()


def _wants_all_kernels(item: pytest.Item) -> bool:
    return item.path.name == "test_compilation.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the compiler's results come last; the last of all finds its programs in Triton's cache then."""
    last = ("test_compilation.py", "test_signal_ptx.py")
    items.sort(key=lambda item: last.index(item.path.name) if item.path.name in last else -1)


def _give_way() -> None:
    """Lets this process have only the time that no other one wants.

    Linux shares the processor among sessions first (man 7 sched, autogroups), so that a process's own niceness counts
    within its session alone, and a command that a test starts in a session of its own would have to share with us.
    """
    os.nice(19)
    with contextlib.suppress(OSError):  # where there are no autogroups
        Path("/proc/self/autogroup").write_text("19")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_wants_all_kernels, session.items)) and not session.config.option.collectonly:
        session.config.stash[_COMPILING] = subprocess.Popen(
            [sys.executable, "-m", "tpfuse.tools.compilation"],
            env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_give_way,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    if _COMPILING in config.stash:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(config.stash[_COMPILING].pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def compiled_beside(request: pytest.FixtureRequest) -> None:
    """Waits until the results of all kernels are kept (`tpfuse.tools.kept_results`)."""
    request.config.stash[_COMPILING].wait()
