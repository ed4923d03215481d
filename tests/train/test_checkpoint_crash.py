"""Killed or failed at any single operation on the disk, a save leaves exactly the old or exactly the new step."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.mark.parametrize(("world", "step_10"), [(1, "absent"), (2, "absent"), (1, "damaged")])
@pytest.mark.parametrize("kind", ["kill", "fail"])
def test_at_every_operation(kind, world, step_10):
    harness = Path(__file__).with_name("crash_harness.py")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In memory where that is possible: what is tested is the order of the calls, not the disk's own patience.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        command = [sys.executable, str(harness), kind, str(world), step_10, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    # The sweep has seen what it is there for.
    for calls in report["calls"]:
        assert calls["write"] >= 4 and calls["fsync"] >= 1
    assert report["calls"][0]["rename"] >= 2 and report["calls"][0]["fsync"] >= 5
    assert report["cases"] == sum(sum(calls.values()) for calls in report["calls"]) * (2 if kind == "kill" else 5)
    assert report["outcomes"]["9"] >= 10 and report["outcomes"]["10"] >= 10
