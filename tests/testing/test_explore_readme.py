"""The README's example of the explorer runs as printed and finds what is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_the_example_prints_what_the_readme_says(tmp_path) -> None:
    readme = (ROOT / "README.md").read_text()
    section = re.search(r"^## The explorer.*?(?=^## )", readme, re.DOTALL | re.MULTILINE)
    assert section is not None
    example, printed = re.findall(r"^```\w*\n(.*?)^```$", section[0], re.DOTALL | re.MULTILINE)[:2]
    signal = '    tl.atomic_xchg(flag, 1, sem="release", scope="sys")\n'
    assert example.count(signal) == 1
    outputs = []
    for text in (example, example.replace(signal, "    tl.debug_barrier()\n" + signal)):
        (tmp_path / "hand_over.py").write_text(text)
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, "hand_over.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        outputs.append(done.stdout + done.stderr)
    assert outputs[0].endswith(printed)
    assert f"`{outputs[1].strip()}`" in section[0]
