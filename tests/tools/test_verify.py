"""`tpfuse verify` works in this process, which interprets kernels, and once as users run it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.cli import run
from tpfuse.switches import resolved_kernels
from tpfuse.testing.inputs import normal
from tpfuse.tools import operators, verify
from tpfuse.tools.operator import Given
from tpfuse.tools.training import TrainingRun

FAST = "rms_norm"


def swish(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
    return x * weight.sigmoid()


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": normal(1, 33, dtype=dtype), "weight": normal(2, 33, dtype=dtype), "shift": torch.arange(33)}


SOUND = Given("small", swish, swish, inputs)


def failed(function: Any, dtype: str = "float32") -> verify.Comparison:
    comparison = verify.compare("swish", replace(SOUND, function=function), dtype, torch.device("cpu"))
    assert not comparison.passed
    return comparison


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_case_that_equals_its_reference_passes(dtype: str) -> None:
    comparison = verify.compare("swish", SOUND, dtype, torch.device("cpu"))
    assert comparison.passed
    assert comparison.error is not None and 0 < comparison.error < comparison.bound
    assert comparison.tensor in ("out", "x", "weight")


def test_each_kind_of_error_is_reported() -> None:
    wrong = failed(lambda x, weight, shift: swish(x, weight) * 1.01)
    assert wrong.error is not None and wrong.error > 10 * wrong.bound

    def wrong_gradient(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return swish(x, weight) + (0.1 * weight - 0.1 * weight.detach())

    assert failed(wrong_gradient).tensor == "weight"
    assert failed(lambda x, weight, shift: swish(x, weight.detach())).failure.endswith("weight: there is no gradient")
    assert "Mismatch in shape" in failed(lambda x, weight, shift: swish(x, weight)[1:]).failure
    assert "expected torch.float16" in failed(lambda x, weight, shift: swish(x, weight).float(), "float16").failure
    nan = failed(lambda x, weight, shift: swish(x, weight) * torch.where(shift == 5, torch.nan, 1))
    assert nan.error is None and not nan.failure

    def raises(**tensors: Tensor) -> Tensor:
        raise RuntimeError("three\n  lines\nof reasons")

    assert failed(raises).failure == "RuntimeError: three lines of reasons"


def test_the_function_runs_with_kernels_and_the_reference_without() -> None:
    seen = []

    def watched(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        seen.append(resolved_kernels("cpu"))
        return swish(x, weight)

    assert verify.compare("swish", replace(SOUND, reference=watched), "float32", torch.device("cpu")).passed
    assert set(seen) == {"torch"}
    seen.clear()
    assert verify.compare("swish", replace(SOUND, function=watched), "float32", torch.device("cpu")).passed
    assert seen == ["triton"]


def use(monkeypatch: pytest.MonkeyPatch, case: Given | None = None) -> None:
    """Make `tpfuse verify` compare one case of the fast operator."""
    description = operators.load(FAST)
    changed = replace(description, cases=(case or description.cases[0],))
    monkeypatch.setattr(operators, "load", lambda name: changed)


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert run(["verify", "--operators", FAST]) == 0
    announced, machine, table = capsys.readouterr().out.split("\n\n", 2)
    assert announced == "comparing rms_norm: without a GPU about half a minute each on two cores"
    assert "\n  ok     Processes can share anonymous memory, through which ranks watch each other.\n" in machine
    lines = table.splitlines()
    assert lines[0].split() == ["operator", "case", "dtype", "error", "bound"]
    assert [line.split()[0] for line in lines[1:4]] == [FAST] * 3
    assert "error: the largest difference from float64" in table
    assert "interpreted" in lines[-2]
    assert lines[-1] == "passed: all 3 cases are within their bounds"


def test_the_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert run(["verify", "--json", "--operators", FAST]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == set("passed machine device versions comparisons training".split())
    assert document["passed"] is True
    assert all(entry.keys() == {"topic", "status", "text"} for entry in document["machine"]) and document["machine"]
    assert document["versions"]["torch"] == torch.__version__
    assert [entry["dtype"] for entry in document["comparisons"]] == ["bfloat16", "float16", "float32"]
    assert all(0 < entry["error"] <= entry["bound"] and entry["passed"] for entry in document["comparisons"])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, weight, shift: swish(x, weight) * 1.1, "FAILED rms_norm, small, float32: "),
        (lambda **tensors: tensors["nothing"], "FAILED rms_norm, small, float16: KeyError: 'nothing'"),
    ],
)
def test_a_wrong_case_gives_status_1(
    function: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, replace(SOUND, function=function))
    assert run(["verify", "--operators", FAST]) == 1
    out, errors = capsys.readouterr()
    assert said in out and "Traceback" not in out + errors
    assert out.endswith("\nFAILED: 0 of 3 cases are within their bounds\n")


def test_an_unknown_operator_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--operators", FAST, "gemmm"]) == 2
    captured = capsys.readouterr()
    accepted = ", ".join([*operators.names(), "training"])
    assert captured.err == (f"tpfuse verify: error: operator 'gemmm' is not known: expected some of {accepted}\n")
    assert captured.out == ""


RUN = TrainingRun("direct", (5.5, 5.4), 1e-7, 1e-6, 2e-6, 0.05)


@pytest.mark.parametrize(
    ("run_", "message"),
    [
        (RUN, None),
        (replace(RUN, distance=3e-6), "FAILED training, direct: weights differ too much"),
        (TrainingRun("fused", failure="PeerTimeout: rank 1"), "FAILED training, fused: PeerTimeout: rank 1"),
    ],
)
def test_the_table_of_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_: TrainingRun, message: str | None
) -> None:
    monkeypatch.setattr(verify, "train_each", lambda: [replace(RUN, name="one rank, torch"), run_])
    assert run(["verify", "--operators", "training"]) == (message is not None)
    out = capsys.readouterr().out
    assert "largest difference of weights" in out and "one rank, torch" in out and "5.400000" in out
    assert message is None or message in out
    assert "norm: the 2-norm of all differences; allowed: what the norm may be" in out
    verdict = "FAILED: 1 of 2" if message else "passed: all 2"
    assert out.endswith(f"\n{verdict} training runs are within their bounds\n")
    assert run(["verify", "--json", "--operators", "training"]) == (message is not None)
    document = json.loads(capsys.readouterr().out)
    assert document["training"][1]["passed"] is (message is None)


@pytest.mark.processes
def test_the_command_starts_the_interpreter_itself() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tpfuse", "verify", "--json", "--operators", FAST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]


CHEAP = [FAST, "adamw", "dropout"]


@pytest.mark.parametrize("operator", [*CHEAP, *exhaustive(*(name for name in operators.names() if name not in CHEAP))])
def test_every_case_of_every_operator_passes(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of the second tier are run as they are compiled in two dtypes too (`test_emulated`)."""
    dtypes = verify.DTYPES if operator in CHEAP else {"bfloat16": torch.bfloat16}
    monkeypatch.setattr(verify, "DTYPES", dtypes)
    torch.set_num_threads(7)
    comparisons, training = verify.compare_here([operator])
    assert training == [] and torch.get_num_threads() != 7, "it takes the threads of a command"
    assert len(comparisons) == len(dtypes) * len(operators.load(operator).cases) > 0
    assert not [comparison for comparison in comparisons if not comparison.passed]
