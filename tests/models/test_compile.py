"""torch.compile(fullgraph=True) makes one graph of the GPT with equal results, by torch's and by Triton's kernels."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation, Kernels
from tpfuse.comm.mesh import group_of
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.parallel.initialize import initialize
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _trained(model: torch.nn.Module, ids: Tensor, at: tuple[int, int] | None) -> list[Tensor]:
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    total = model(ids, ids.roll(-1, 1), loss_weight=0.1, dropout_at=at)
    total.backward()
    return [total.detach(), *(_local(parameter.grad).clone() for parameter in model.parameters())]


def _check(model: GPT, batches: Sequence[int], length: int, names: Sequence[Implementation] = ("auto",)) -> Any:
    """Check that one graph serves all steps and implementations, and computes the numbers of the eager model.

    Each step has other dropout masks. Other sizes of a batch compile a new graph. Return the compiled model.
    """
    initialize(model, 1)
    torch._dynamo.utils.counters.clear()
    compiled = _compiled(model)
    for step, batch in enumerate(batches):
        ids = integers(step, batch, length, low=0, high=60, dtype=torch.int64)
        at = (7, step) if model.config.dropout else None
        with use(implementation=names[step % len(names)]):
            assert all(map(torch.equal, _trained(compiled, ids, at), _trained(model, ids, at)))
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0
    return compiled


@pytest.mark.parametrize(
    ("name", "dropout", "batches"), [("torch", 0.2, (2, 2, 2)), *exhaustive(("triton", 0.0, (2,)))]
)
def test_one_graph_and_the_same_numbers(name: Kernels, dropout: float, batches: tuple[int, ...]) -> None:
    with use(kernels=name):
        model = GPT(GPTConfig(61, 8, 32, 1, 2, dropout=dropout))
        compiled = _check(model, batches, 8)
        ids = integers(0, 2, 8, low=0, high=60, dtype=torch.int64)
        with torch.no_grad():
            assert torch.equal(compiled(ids), model(ids))
            assert torch.equal(compiled(ids, ids), model(ids, ids))


@pytest.mark.exhaustive
@on_ranks(2)
def test_tensor_parallel_models_are_one_graph() -> None:
    model = parallelize_gpt(GPT(GPTConfig(61, 8, 32, 1, 4, dropout=0.2)), tensor_mesh())
    compiled = _check(model, (2, 3, 4), 8, ("direct", "collective", "fused"))
    ids = integers(0, 2, 8, low=0, high=60, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(compiled(ids, ids), model(ids, ids))


@pytest.mark.exhaustive
@on_ranks(4)
def test_context_parallel_models_are_one_graph() -> None:
    """Attention with its exchange is one node of the graph."""
    model = GPT(GPTConfig(61, 8, 32, 1, 4, dropout=0.2))
    _check(parallelize_gpt(model, mesh_of(1, 1, 4, ulysses=2)), (2,), 7)


@on_ranks(2)
def test_products_are_in_one_graph() -> None:
    group = group_of(tensor_mesh())

    def products(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Tensor:
        outs = all_gather_linear(x, [q, k, v], [None, bias, None], group, activation="gelu")
        assert sum(out.shape[-1] for out in outs) == 14
        y = linear_reduce_scatter(torch.cat(outs, -1), up, None, group)
        return linear_all_reduce(y, down, None, group)

    results = []
    shapes = [(5, 8), (6, 8), (4, 8), (4, 8), (4,), (8, 14), (3, 8)]
    for function in (products, _compiled(products)):
        leaves = [normal(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
        leaves[3].requires_grad_(False)
        out = function(*leaves)
        assert out.shape == (5, 3)
        out.backward(normal(9, *out.shape))
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)])
        assert leaves[3].grad is None
    assert all(map(torch.equal, *results))
