"""The front ends of the Triton versions of torch 2.11 to 2.15 accept every kernel, as far as they distinguish kernels.

`make test` installs the other two compilers next to the installed one.
"""

import subprocess
import sys

import pytest

from tests.support.compilations import OTHER_TRITONS, TRITONS, compiling, read_report
from tests.support.tiers import exhaustive
from tpfuse.kernels.configurations import TABLE
from tpfuse.tools import operators
from tpfuse.tools.front_end import lost_copies
from tpfuse.tools.gate import violations

KERNELS_FOLDER = TABLE.parent

# A version, how many features occur together (`front_end.representatives`), and dtypes. The second tier compiles every
# kernel by the installed version (test_compilation.py). The family is sm_90: the other families have no constants of
# their own except sizes, and launches that TMA cannot read are among those of sm_90. The front end accepts float16
# wherever it accepts bfloat16.
KERNELS = [
    *((version, 1, "bfloat16") for version in (TRITONS[0], TRITONS[-1])),
    *exhaustive(*((version, 2, "bfloat16 float32") for version in OTHER_TRITONS)),
]
# These operators launch a kernel that no operator before them launches.
OWN_KERNELS = set(operators.names()) - {"rms_norm", "linear_cross_entropy", "attention_forward"}


COPIED = """
def kernel(out_ptr, stage, n):
    before = {first}
    for i in range(n):
        tl.store(out_ptr + i, before)
        before = stage
        {last}
"""


@pytest.mark.parametrize(
    ("first", "last", "lost"),
    [
        ("stage", "stage += 1", ["6: before = stage is also ahead of the loop: it would not be carried"]),
        ("stage - 1", "stage += 1", []),
        ("stage", "other = 1", []),  # `before` does not change
    ],
)
def test_a_copy_that_a_loop_would_not_carry_is_refused(first: str, last: str, lost: list[str]) -> None:
    assert [*lost_copies(COPIED.format(first=first, last=last))] == lost


def test_no_kernel_has_such_a_copy() -> None:
    found = {file.name: [*lost_copies(file.read_text())] for file in KERNELS_FOLDER.glob("*.py")}
    assert len(found) > 30 and {name: lost for name, lost in found.items() if lost} == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "together", "dtypes"), KERNELS)
def test_every_kernel_passes(version: str, together: int, dtypes: str) -> None:
    flags = ["--json", "--front-end", str(together), "--families", "sm_90", "--dtypes", *dtypes.split()]
    command = [sys.executable, "-m", "tpfuse.tools.compilation", *flags]
    done = subprocess.run(command, env=compiling(version), capture_output=True, text=True)
    assert done.stdout, done.stderr
    report = read_report(done.stdout)
    assert report.triton == version
    assert {result.operator for result in report.compilations} >= OWN_KERNELS
    wrong = [line for result in report.compilations for line in violations(result) if result.error]
    assert not wrong, "\n".join(wrong)
