"""The settings of all tests: one seed, and deterministic algorithms, which fill new memory with NaN.

Each process has one thread, or as many as OMP_NUM_THREADS says: the tensors are small, and the ranks of the pools need
the other cores. ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA choose other instructions, under which all tests pass too.
"""

import contextlib
import io
import os
import random
import resource
import shutil
import signal
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

from tpfuse.comm.limits import repeat_bits, set_threads
from tpfuse.testing import ranks
from tpfuse.testing.patience import patient

torch.use_deterministic_algorithms(True)
# A test that trains with virtual ranks in this process sets MKL_CBWR, which pools take over when they start: without it
# here, those that start before and after would round otherwise.
repeat_bits()
set_threads(1)
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ranks inherit it and keep all tests' groups.
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, 2**16 if _hard < 0 else min(_hard, 2**16)), _hard))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background; commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def _named(value: object) -> str:
    """Return the id of a value that pytest would number; empty if it has no short one, the same in every process."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return ", ".join(f"{_named(key)} {_named(x)}" for key, x in value.items()) or "{}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_named, value))})"
    text = str(getattr(value, "__name__", value)).encode("unicode_escape").decode()
    return "" if " at 0x" in text or isinstance(value, set | frozenset | torch.Tensor) else text


def pytest_make_parametrize_id(val: object) -> str | None:
    """Call rows after their values, so that a failure says what failed. None: pytest's own way."""
    name = "" if isinstance(val, str | int | float | None) else _named(val)
    return name if 0 < len(name) <= 80 else None


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
    from tpfuse.cli import run

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
def commands(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return the `Commands` of this process, which write into a folder of this test."""
    from tests.support.command import Commands
    from tpfuse.cli import run

    return Commands(run, flags, tmp_path / "run", capfd)
