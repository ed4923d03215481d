"""The compiler works while other tests run, on the cores that they leave; the tests of its results come last."""

import os
import subprocess
import sys

import pytest

_COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()


def _wants_all_kernels(item: pytest.Item) -> bool:
    return item.path.name == "test_compilation.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_wants_all_kernels)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_wants_all_kernels, session.items)) and not session.config.option.collectonly:
        session.config.stash[_COMPILING] = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-m", "tpfuse.profile.compilation"],
            env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    if _COMPILING in config.stash:
        config.stash[_COMPILING].terminate()


@pytest.fixture(scope="session")
def compiled_beside(request: pytest.FixtureRequest) -> None:
    """Waits until the results of all kernels are kept (`tpfuse.profile.kept_results`)."""
    request.config.stash[_COMPILING].wait()
