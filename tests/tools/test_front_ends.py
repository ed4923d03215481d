"""The front ends of the Triton versions of torch 2.11 to 2.15 accept every kernel, as far as they distinguish kernels.

`make test` installs the other two compilers next to the installed one.
"""

import subprocess
import sys

import pytest

from tests.support.compilations import OTHER_TRITONS, TRITONS, compiling, read_report
from tests.support.tiers import exhaustive
from tests.tools.test_gate import compile_toys
from tpfuse.tools import operators
from tpfuse.tools.gate import violations

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


@pytest.mark.parametrize("version", [TRITONS[-1], *exhaustive(*TRITONS[:-1])])
def test_a_copy_that_a_loop_does_not_carry_is_refused(version: str) -> None:
    flags = ("copied", "--json", "--front-end", "1", "--families", "sm_90", "--dtypes", "bfloat16")
    report = read_report(compile_toys(*flags, **compiling(version)).stdout)
    errors = {result.kernel.removesuffix("_kernel"): result.error for result in report.compilations}
    assert errors.keys() == {"copied", "same_start", "sometimes_copied", "carried"} and not errors.pop("carried")
    assert all("the loop changes before, but Triton does not carry it" in error for error in errors.values()), errors
