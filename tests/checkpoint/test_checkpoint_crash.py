"""A save that is killed or fails at any single disk operation leaves exactly the old or exactly the new step."""

import importlib.util
import tempfile
from pathlib import Path

import pytest

from tests.support.tiers import exhaustive
from tpfuse.testing.ranks import run_apart


def swept(kind: str, world: int, damaged: bool, every: int, folder: str) -> dict:
    """Run the harness in another process, since it changes the os module and forks, and return its results."""
    spec = importlib.util.spec_from_file_location("crash_harness", Path(__file__).with_name("crash_harness.py"))
    assert spec is not None and spec.loader is not None
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    return harness.sweep(kind, world, damaged, every, Path(folder))


@pytest.mark.parametrize(
    ("kind", "world", "step_10", "every"),
    [
        ("kill", 2, "absent", 5),
        ("fail", 1, "damaged", 5),
        *exhaustive(("kill", 2, "damaged", 1), ("fail", 2, "damaged", 2)),
    ],
)
def test_a_save_struck_at_every_operation_leaves_the_old_or_the_new_step(kind, world, step_10, every):
    # The folder is in memory if possible: the test is about the order of the calls, not about the speed of the disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        report = run_apart(swept, kind, world, step_10 == "damaged", every, folder)
    assert report["problems"] == []
    # The sweep has reached the outcomes that it is meant to test.
    for calls in report["calls"]:
        assert calls["write"] >= 4 and calls["fsync"] >= 1
    assert report["calls"][0]["rename"] >= 2 and report["calls"][0]["fsync"] >= 5
    strikes = sum(sum(calls.values()) for calls in report["calls"]) * (2 if kind == "kill" else 5)
    assert report["cases"] == strikes if every == 1 else report["cases"] > strikes / every - 10
    assert min(report["outcomes"][9], report["outcomes"][10]) >= (10 if every == 1 else 2)
