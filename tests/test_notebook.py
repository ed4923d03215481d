"""docs/race.ipynb runs, prints what it shows, and has the kernel of the example."""

import ast
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "race.ipynb"


def _run(source: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does. Return the text that it prints, and that of a last expression."""
    magic, _, program = source.partition("\n")
    if magic.startswith("%%writefile "):
        file = magic.split()[1]
        Path(file).write_text(program + "\n")
        return f"Writing {file}\n"
    tree, value = ast.parse(source), None
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(last, "cell", "eval"), names)
    return printed.getvalue() + ("" if value is None else repr(value))


def _text(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    return "" if "image/png" in data else "".join(output.get("text") or data["text/plain"])


def test_the_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in Jupyter's kernel
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    try:
        for cell in cells:
            assert _run("".join(cell["source"]), names) == "".join(map(_text, cell["outputs"]))
    finally:
        for module in ("hand_over", "race"):
            sys.modules.pop(module, None)
    assert Path("hand_over.py").read_text() == (ROOT / "examples" / "hand_over.py").read_text()
    *boxes, line = names["figure"].axes[0].texts
    red = [box for box in boxes if box.get_bbox_patch().get_edgecolor()[:3] == (1.0, 0.0, 0.0)]
    assert [box.get_text()[:16] for box in red] == ["store 0  race:13", "read  race:21 as"] and len(boxes) == 7
    assert [line.xyann, line.xy] == [box.get_position() for box in red], "a line joins the two"
    pyplot.close(names["figure"])
