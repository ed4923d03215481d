"""The settings of all tests: one seed, and deterministic algorithms, which fill new memory with NaN.

Each process has one thread, or as many as OMP_NUM_THREADS says: the tensors are small, and the ranks of the pools need
the other cores. ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA choose other instructions, under which all tests pass too.
"""

import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

# It must be set before torch is imported, and commands inherit it. A command on one rank would take all cores, and its
# threads would wait for each other in every product, for milliseconds each, since other tests compute on these cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# It must be set before triton is imported; the ranks of the pools inherit it. Tests marked gpu need no interpreter, and
# not every Triton has one for every numpy: run them by TRITON_INTERPRET=0 pytest -m gpu.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import pytest_timeout
import torch

from tpfuse.comm.limits import set_threads
from tpfuse.testing import ranks
from tpfuse.testing.patience import patient

torch.use_deterministic_algorithms(True)
set_threads(1)
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ranks inherit it and keep all tests' groups.
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, 2**16 if _hard < 0 else min(_hard, 2**16)), _hard))

# Most tests import no more. Each rank of a new pool would compute two seconds to import transformers and peft.
ranks.PRELOADED += ["pytest", "tpfuse.train.trainer", "peft", "transformers.models.llama.modeling_llama"]


# Tests with these markers and of these files take these seconds, roughly, and others a third of a second.
_SECONDS = {"processes": 15.0, "nodes": 15.0, "compile": 10.0, "exhaustive": 1.0}
_SECONDS |= {"test_emulated.py": 20.0, "test_front_ends.py": 10.0}
# They wait for what compiles beside the other tests; the second finds its programs in Triton's cache then.
_LAST = ("test_compilation.py", "test_signal_ptx.py")


@pytest.hookimpl(trylast=True)  # after the choice of tests by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take the longest, so that no process has a long one left when the others are done."""
    seconds: Counter[Path] = Counter()
    for item in items:
        seconds[item.path] += max(
            _SECONDS.get(name, 0.3) for name in (item.path.name, *(mark.name for mark in item.iter_markers()))
        )
    last = {name: place for place, name in enumerate(_LAST)}
    items.sort(key=lambda item: (last.get(item.path.name, -1), -seconds[item.path], str(item.path)))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> object:
    """Extend a test's time limit as far as the machine is slower when the test begins."""
    settings = settings._replace(timeout=patient(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, settings)


@pytest.fixture(autouse=True)
def _seed_and_threads() -> None:
    """Set the seed and the number of threads, so that they do not depend on the tests before this one."""
    torch.manual_seed(0)
    set_threads(1)
