"""The gate passes every kernel in every configuration that can be chosen at run time, compiled for every family.

Results are stored in Triton's cache, so that only kernels that have changed are compiled. `make compiled` writes the
table that a test compares with the results; `make compiled-matrix` runs this file under other versions of Triton.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.compilations import compiling, read_report
from tpfuse.kernels.configurations import TABLE, Configuration, read_table
from tpfuse.kernels.launch import FAMILIES
from tpfuse.tools import gate, operators
from tpfuse.tools.compilation import CompilationReport
from tpfuse.tools.gate import table, violations

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "compiled.md"

pytestmark = [pytest.mark.compile, pytest.mark.timeout(1800)]  # the first test waits for all compilations


@pytest.fixture(scope="session")
def report(compiled_beside: None) -> CompilationReport:
    command = [sys.executable, "-m", "tpfuse.tools.compilation", "--json"]
    report = read_report(subprocess.run(command, env=compiling(), stdout=subprocess.PIPE, text=True).stdout)
    print(table(report.compilations, report.triton))
    return report


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operator", operators.names())
def test_every_kernel_passes_the_gate(report: CompilationReport, operator: str, family: str) -> None:
    results = [result for result in report.compilations if (result.operator, result.family) == (operator, family)]
    assert results, "nothing was recorded"
    wrong = [line for result in results for line in violations(result)]
    assert not wrong, "\n".join(wrong)


def rows() -> Iterator[Configuration]:
    yield from (row for row in read_table(TABLE) if row.family in FAMILIES)


def test_every_row_of_the_configurations_is_compiled(report: CompilationReport) -> None:
    missing = [row for row in rows() if row not in report.rows]
    assert not missing, "\n".join(f"{row.operator}.{row.family}: {row}" for row in missing)


@pytest.mark.parametrize(
    ("violates", "exceptions"),
    [
        (lambda result: result.dot and gate.slow(result), gate.EXCEPTIONS),
        (gate.moves_little, gate.NARROW_EXCEPTIONS),
    ],
)
def test_every_exception_is_needed(report: CompilationReport, violates: Any, exceptions: dict[str, str]) -> None:
    results = [result for result in report.compilations if not result.error and violates(result)]
    assert {gate.listed(exceptions, result) for result in results} == exceptions.keys()


def test_every_accepted_spill_is_needed(report: CompilationReport) -> None:
    accepted = gate.SPILLS.get(".".join(report.triton.split(".")[:2]), {})
    spilled = [result for result in report.compilations if result.spilled]
    most = {p: max((x.spilled for x in spilled if re.search(p, gate.named(x))), default=0) for p in accepted}
    assert most == {pattern: size for pattern, (size, _) in accepted.items()}


def test_the_committed_table_is_current(report: CompilationReport) -> None:
    committed = COMMITTED.read_text()
    (version,) = re.findall(r"^Triton (\S+) compiled", committed, re.MULTILINE)
    if version != report.triton:
        pytest.skip(f"the table is of Triton {version}, this is {report.triton}")
    assert table(report.compilations, report.triton) == committed, "make compiled"
