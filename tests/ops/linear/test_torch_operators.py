"""torch's operators as candidates of a measurement, with a stand-in that computes by collectives on CPU ranks."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpfuse
from tests.ops.linear.parallel_products import PRODUCTS, Case
from tests.ops.linear.stand_in_operators import StandInOperators
from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tpfuse.comm import autotune as tuner
from tpfuse.comm.autotune import autotune
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.ops.linear import dispatch, torch_operators
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.torch_operators import CANDIDATES, TorchLinear, obstacles
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


def _stand_in(patch: pytest.MonkeyPatch) -> StandInOperators:
    """Let the stand-in take the place of torch's operators, and CPU tensors that of a GPU's with multicast."""
    operators = StandInOperators()
    patch.setattr(torch_operators, "_operators", lambda: operators)
    patch.setattr(torch_operators, "_workspace", operators.workspace)
    patch.setattr(torch_operators, "_missing", lambda device, names: "")
    patch.setattr(torch_operators, "_has_multicast", lambda device: True)
    patch.setitem(dispatch.CANDIDATES, "cpu", ("direct", *CANDIDATES))
    return operators


CASES = (
    Case(rows=(6, 2), k=5, n=8, whole_numbers=True),
    Case(rows=(4,), k=3, n=4, whole_numbers=True, bias=False, residual=False),
    Case(BF16, rows=(4,), k=33, n=16),
)


def _right(name: str) -> list[str]:
    """Check forward, gradients and layouts of the products that a candidate computes. Return the operators it calls."""
    group = dist.new_group()
    linear = TorchLinear(group, symmetric_memory(group, CPU), name)
    with pytest.MonkeyPatch.context() as patch:
        operators = _stand_in(patch)
        patch.setattr(dispatch, "parallel_linear", lambda x, group: linear)
        for operator, product in PRODUCTS.items():
            method = operator.removeprefix("linear_").removesuffix("_linear")
            if method in CANDIDATES[name][1]:
                for case in CASES:
                    with naming((method, case)):
                        product.check(case, group)
                product.check_without_gradients(group)
                if method != "all_reduce":  # its gradients need no communication
                    product.check_each_gradient_alone(group)
        features = 2 + group.rank()  # as where the world does not divide them
        exit_of_block = linear.reduce_scatter if name == "torch fused" else linear.all_reduce
        total = exit_of_block(torch.ones(4, features), torch.ones(4, features), None, None)
        assert torch.equal(total, torch.full_like(total, 5.0))
        if name == "torch fused":
            x, weights = normal(1, 4, 5), [normal(2, 8, 5), normal(3, 4, 5)]
            leaf = x.clone().requires_grad_()
            one, other = all_gather_linear(leaf, weights, None, group, activation="gelu_tanh")
            (one.sum() + other.sum()).backward()
            whole = x.repeat(group.size(), 1).requires_grad_()
            sum(nn.functional.gelu(whole @ w.t(), approximate="tanh").sum() for w in weights).backward()  # type: ignore[union-attr]
            assert leaf.grad is not None and whole.grad is not None
            torch.testing.assert_close(leaf.grad, group.size() * whole.grad[:4])
    return sorted({call[0] for call in operators.calls})


@pytest.mark.parametrize("name", CANDIDATES)
def test_results_and_layouts_are_those_of_collectives(name: str) -> None:
    assert pool(2).run(_right, name) == [sorted(CANDIDATES[name][0])] * 2


def _taken(wanted: str, file: str) -> tuple[list[str], set[str], list[str]]:
    """Let candidates whose names begin with `wanted` be the fastest.

    Return the decisions for one product of each kind, the operators that compute after them, and what `tpfuse.explain`
    prints.
    """
    group, rows = tensor_mesh().get_group(), 4 + 4 * len(wanted)
    x, weight = torch.ones(rows, 4), torch.ones(4, 4)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        operators = _stand_in(patch)
        patch.setattr(tuner, "_milliseconds", lambda run, device: 1.0 + (not run.args[0].startswith(wanted)))
        with autotune(600, file=Path(file)) as found:
            for product in PRODUCTS.values():
                product.function(x, weight, None, group)
            linear_all_reduce(torch.ones(3, 4), torch.ones(1, 4), None, group)  # not a multiple of 16 bytes
        operators.calls.clear()
        for product in PRODUCTS.values():
            product.function(x, weight, None, group)
        model = RowParallelLinear(8, 4, device_mesh=tensor_mesh())
        with contextlib.redirect_stdout(io.StringIO()) as out:
            tpfuse.explain(model)
    taken = [decision.taken for decision in found.decisions.values()]
    return taken, {call[0] for call in operators.calls}, out.getvalue().splitlines()


def test_the_fastest_of_torchs_operators_is_taken_and_explained(tmp_path: Path) -> None:
    (taken, called, lines), other = pool(2).run(_taken, "torch", str(tmp_path / "decisions.json"))
    assert taken == other[0] == ["torch fused", "torch fused", "torch one-shot", "direct"]
    assert called == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter", "one_shot_all_reduce"}
    assert [line.partition(": ")[2] for line in lines[2:]] == ["measured"] * 3 + [
        "not possible: deterministic algorithms are required, and the switch decides the order of sums"
    ]


def _reasons(dtype: torch.dtype, deterministic: bool, replaced: dict[str, Any]) -> list[str]:
    """Return why each candidate is not possible."""
    with pytest.MonkeyPatch.context() as patch:
        _stand_in(patch)
        for name, value in replaced.items():
            patch.setattr(torch_operators, name, value(dist.get_rank()) if callable(value) else value)
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
        return list(obstacles(dist.new_group(), CPU, dtype).values())


def _without_multicast(rank: int) -> Any:
    """Only the second rank's GPU has none."""
    return lambda device: rank == 0


NO_MULTICAST = "the GPU has no multicast, or TORCH_SYMM_MEM_DISABLE_MULTICAST=1 turns it off"


@pytest.mark.parametrize(
    ("dtype", "replaced", "said"),
    [
        (F32, {}, ["", "", "", ""]),
        (torch.float16, {}, ["", *["torch's kernels sum float32 and bfloat16, not float16"] * 3]),
        (F32, {"MOST_RANKS": 1}, ["torch's operators are tried for 2 to 1 ranks, not for 2"] * 4),
        (BF16, {"_has_multicast": _without_multicast}, ["", "", "", NO_MULTICAST]),
    ],
)
def test_each_candidate_that_is_not_possible_has_its_reason(
    dtype: torch.dtype, replaced: dict[str, Any], said: list[str]
) -> None:
    assert pool(2).run(_reasons, dtype, False, replaced) == [said] * 2


def test_what_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_operators, "_operators", lambda: SimpleNamespace(one_shot_all_reduce=1))
    missing = [torch_operators._missing(torch.device("cuda"), names) for names, _ in CANDIDATES.values()]
    assert missing[1:3] == ["", f"torch {torch.__version__} has no torch.ops.symm_mem.two_shot_all_reduce_"]
    assert torch_operators._missing(CPU, ()) == "torch's operators are for GPUs, not for cpu"


def test_the_installed_torch_has_the_operators_with_these_arguments() -> None:
    operators = torch_operators._operators()
    names = [name for names, _ in CANDIDATES.values() for name in names]
    schemas = {name: str(getattr(operators, name).default._schema) for name in names}
    gather = "Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A"
    assert gather in schemas["fused_all_gather_matmul"]
    assert "Tensor A, Tensor B, str reduce_op, int scatter_dim, str" in schemas["fused_matmul_reduce_scatter"]
    for name in ("one_shot_all_reduce", "two_shot_all_reduce_", "multimem_all_reduce_"):
        assert " input, str reduce_op, str group_name) -> Tensor" in schemas[name]
