"""What every test wants: deterministic algorithms, under which memory that nobody wrote is NaN, and one seed.

One thread: the tensors are small, and the ranks of the pools need the other cores.
"""

import os
import resource
from typing import Any

import pytest
import pytest_timeout
import torch

from tpfuse.testing import ranks
from tpfuse.testing.patience import patient

# Before triton is imported; the ranks of the pools inherit it. Tests marked gpu need no interpreter, and not every
# Triton has one with every numpy: TRITON_INTERPRET=0 pytest -m gpu.
os.environ.setdefault("TRITON_INTERPRET", "1")
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the ranks inherit it, and keep the groups of all tests
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, 2**16 if _hard < 0 else min(_hard, 2**16)), _hard))

ranks.PRELOADED += ["pytest", "tpfuse.train.trainer"]  # most tests import no more


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> object:
    """A test may take as much longer as the machine is slower when the test begins."""
    settings = settings._replace(timeout=patient(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, settings)


@pytest.fixture(autouse=True)
def _seed_and_threads() -> None:
    """What a test draws, and how many threads it has, does not depend on the tests before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
