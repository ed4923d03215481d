"""Killed or failed at any single operation on the disk, a save leaves exactly the old or exactly the new step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("world", "step_10"), [(1, "absent"), (2, "absent"), (1, "damaged")])
@pytest.mark.parametrize("kind", ["kill", "fail"])
def test_at_every_operation(tmp_path, kind, world, step_10):
    harness = Path(__file__).with_name("crash_harness.py")
    command = [sys.executable, str(harness), kind, str(world), step_10, str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    # The sweep has seen what it is there for.
    for calls in report["calls"]:
        assert calls["write"] >= 5 and calls["fsync"] >= 1
    assert report["calls"][0]["rename"] >= 2 and report["calls"][0]["fsync"] >= 5
    assert report["cases"] == sum(sum(calls.values()) for calls in report["calls"]) * (2 if kind == "kill" else 5)
    assert report["outcomes"]["9"] >= 10 and report["outcomes"]["10"] >= 10
