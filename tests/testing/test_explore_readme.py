"""The README's examples of the explorer run as printed and find what is printed."""

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
    example, printed, needed = re.findall(r"^```\w*\n(.*?)^```$", section[0], re.DOTALL | re.MULTILINE)
    signal = '    tl.atomic_xchg(flag, 1, sem="release", scope="sys")\n'
    assert example.count(signal) == 1
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    def said_by(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        command = [sys.executable, name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert said_by("hand_over.py", example).endswith(printed)
    said = said_by("hand_over.py", example.replace(signal, "    tl.debug_barrier()\n" + signal))
    assert f"`{said.strip()}`" in section[0]
    assert f"`{said_by('needed.py', needed).strip()}`" in section[0]
