"""The tool that plants faults: the faults of a function, the sample of them, and which tier catches each."""

import ast
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tpfuse.testing.faults.__main__ import report
from tpfuse.testing.faults.plant import AREAS, faults_of, sample
from tpfuse.testing.faults.record import DEFERRING, RecordedTest, record
from tpfuse.testing.faults.run import portions, run

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A module."""
LIMIT = 3


def clipped(x: int, low: int = 0) -> int:
    """A docstring with 5 numbers."""
    if x < low and x != LIMIT:
        raise ValueError(f"{x + 1} is below")
    total: list[int] = sorted(
        [x, low],
        reverse=True,
    )
    total.append(2)
    return total[0] + 1


class Counter:
    def add(self, x: int) -> None:
        self.x += x
'''


def test_the_faults_of_a_function() -> None:
    faults = faults_of(SOURCE, "layers", "module.py")
    found = [(fault.function, fault.kind, fault.begin[0], fault.after) for fault in faults]
    assert found == [
        ("clipped", "condition negated", 7, "(not (x < low and x != LIMIT))"),
        ("clipped", "and, or", 7, "((x < low) or (x != LIMIT))"),
        ("clipped", "comparison", 7, "(x <= low)"),
        ("clipped", "comparison", 7, "(x == LIMIT)"),
        ("clipped", "statement deleted", 8, "pass"),
        ("clipped", "argument reverse dropped", 9, "sorted([x, low])"),
        ("clipped", "constant", 11, "False"),
        ("clipped", "statement deleted", 13, "pass"),
        ("clipped", "constant", 13, "3"),
        ("clipped", "arithmetic", 14, "((total[0]) - (1))"),
        ("clipped", "constant", 14, "2"),
        ("clipped", "constant", 14, "1"),
        ("Counter.add", "statement deleted", 19, "pass"),
    ]
    for fault in faults:
        planted = fault.planted(SOURCE)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(SOURCE)), fault
        assert len(planted.splitlines()) == len(SOURCE.splitlines()), "lines after the fault keep their numbers"


@pytest.mark.exhaustive
def test_the_sample_is_spread_over_areas_files_and_functions() -> None:
    chosen = sample(ROOT, 60, seed=1)
    assert Counter(fault.area for fault in chosen) == dict.fromkeys(AREAS, 10)
    assert len({(fault.file, fault.function) for fault in chosen}) == 60
    assert chosen == sample(ROOT, 60, seed=1)
    assert chosen[:12] == sample(ROOT, 12, seed=1), "a longer sample begins as a shorter one"
    assert chosen != sample(ROOT, 60, seed=2)
    for fault in chosen[:6]:
        compile(fault.planted((ROOT / fault.file).read_text()), fault.file, "exec")


def test_quick_tests_of_the_same_name_are_tried_first() -> None:
    tests = [
        RecordedTest("tests/test_other.py::test_slow", 9.0, True),
        RecordedTest("tests/test_other.py::test_quick", 0.1, True),
        *(RecordedTest(f"tests/test_gemm.py::test_rows[{row}]", 1.0, True) for row in range(5)),
    ]
    found, left = portions(tests, "gemm", limit=100.0)
    assert [test.name.partition("::")[2] for portion in found for test in portion] == [
        "test_rows[0]", "test_rows[1]", "test_quick", "test_slow", "test_rows[2]", "test_rows[3]", "test_rows[4]",
    ]  # fmt: skip
    assert len(found) > 1 and left == 0
    assert portions(tests, "gemm", limit=6.0)[1] == 1, "the slow one"


def test_the_makefile_defers_the_same_markers() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("FIRST_TIER")]
    assert line.partition("(")[2].strip(" )").split(" or ") == list(DEFERRING)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with three functions: one is tested by the first tier, one by the second, and one is only called."""
    root = tmp_path / "checkout"
    for name in ("tpfuse/layers", "kernels", "models", "tests", "benchmarks"):
        (root / name).mkdir(parents=True)
    (root / "tpfuse" / "layers" / "sums.py").write_text(
        "def plus(x, y):\n    return x + y\n\n\ndef minus(x, y):\n    return x - y\n\n\n"
        "def idle(x):\n    return 2 * x\n"
    )
    (root / "tests" / "test_sums.py").write_text(
        "import pytest\nfrom tpfuse.layers.sums import idle, minus, plus\n\n\ndef test_plus():\n"
        "    assert plus(2, 1) == 3\n\n\n@pytest.mark.exhaustive\ndef test_minus():\n    assert minus(2, 1) == 1\n\n\n"
        "def test_idle():\n    idle(2)\n"
    )
    (root / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '-q --import-mode=importlib'\nmarkers = ['exhaustive']\n"
    )
    return root


@pytest.mark.processes
def test_faults_are_caught_by_the_tier_that_tests_them(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    if sys.version_info >= (3, 12):
        # The recorder's plugin is imported from the checkout under test, which here is not a checkout of tpfuse.
        (checkout / "tpfuse" / "testing").symlink_to(ROOT / "tpfuse" / "testing")
        assert record(checkout, folder, []) == 0
        (checkout / "tpfuse" / "testing").unlink()
    else:
        folder.mkdir()
        names = ("plus", "minus", "idle")
        rows = [
            {
                "number": number,
                "name": f"tests/test_sums.py::test_{name}",
                "seconds": 0.1,
                "outcome": "passed",
                "markers": ["exhaustive"] if name == "minus" else [],
            }
            for number, name in enumerate(names, start=1)
        ]
        (folder / "tests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        calls = [f"{number}\ttpfuse/layers/sums.py\t{name}\n" for number, name in enumerate(names, start=1)]
        (folder / "calls-1").write_text("".join(calls))
    run(checkout, folder, count=10, seed=0, workers=1, limit=10.0)
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    tiers = {(row["fault"].split()[1].strip(":"), row["tier"]) for row in results}
    assert tiers == {("plus", "first"), ("minus", "second"), ("idle", "")}
    assert [row["reached"] for row in results if "minus" in row["fault"]] == [[0, 1]]
    text = report(folder)
    assert "layers" in text and "50.0%" in text and "survived both tiers" in text
    run(checkout, folder, count=10, seed=0, workers=1, limit=10.0)
    assert len((folder / "results.jsonl").read_text().splitlines()) == len(results), "nothing is tried twice"
