"""torch.compile(fullgraph=True) makes one graph of the GPT with equal results, by torch's and by Triton's kernels."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfuse.backend import Implementation, Kernels, implementation, kernels
from tpfuse.comm.mesh import context_mesh, group_of
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import mesh_of, tensor_mesh
from tpfuse.testing.ranks import on_ranks
from tpfuse.testing.tiers import exhaustive


def _trained(model: torch.nn.Module, ids: Tensor, at: tuple[int, int] | None) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss and the gradients of one step."""
    model.zero_grad()
    total = model(ids, ids.roll(-1, 1), loss_weight=0.1, dropout_at=at)
    total.backward()
    return total.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("name", "dropout"), [("torch", 0.2), *exhaustive(("triton", 0.2), ("torch", 0.0))])
def test_one_graph_and_the_same_numbers(name: Kernels, dropout: float) -> None:
    model = GPT(GPTConfig(61, 8, 32, 1, 2, dropout=dropout))
    initialize(model, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with kernels(name):
        for step in range(3):  # each step has other masks, and one graph serves all
            ids = integers(step, 2, 8, low=0, high=60, dtype=torch.int64)
            at = (7, step) if dropout else None
            loss, gradients = _trained(model, ids, at)
            compiled_loss, compiled_gradients = _trained(compiled, ids, at)
            assert torch.equal(compiled_loss, loss)
            for found, expected in zip(compiled_gradients, gradients, strict=True):
                assert torch.equal(found, expected)
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


@pytest.mark.parametrize("name", exhaustive("torch", "triton"))
def test_logits_and_losses_are_those_of_the_eager_model(name: Kernels) -> None:
    model = GPT(GPTConfig(61, 8, 32, 1, 2))
    initialize(model, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = integers(1, 2, 8, low=0, high=60, dtype=torch.int64)
    with kernels(name), torch.no_grad():
        assert torch.equal(compiled(ids), model(ids))
        assert torch.equal(compiled(ids, ids), model(ids, ids))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


@pytest.mark.exhaustive
@on_ranks(2)
def test_tensor_parallel_models_are_one_graph() -> None:
    """A single graph serves every implementation, which is chosen at run time. Other sizes compile a new graph."""
    model = GPT(GPTConfig(61, 8, 32, 1, 4, dropout=0.2), device_mesh=tensor_mesh())
    initialize(model, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    names: tuple[Implementation, ...] = ("direct", "collective", "fused")
    for batch, name in enumerate(names, start=2):
        with implementation(name):
            ids = integers(batch, batch, 8, low=0, high=60, dtype=torch.int64)
            loss, gradients = _trained(model, ids, (7, batch))
            compiled_loss, compiled_gradients = _trained(compiled, ids, (7, batch))
            assert torch.equal(compiled_loss, loss)
            for found, expected in zip(compiled_gradients, gradients, strict=True):
                assert torch.equal(_local(found), _local(expected))
            if name == "direct":
                with torch.no_grad():
                    assert torch.equal(compiled(ids), model(ids))
                    assert torch.equal(compiled(ids, ids), model(ids, ids))
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "ulysses"), [(2, 1), (4, 2)])
@on_ranks("world")
def test_context_parallel_models_are_one_graph(ulysses: int) -> None:
    """Context-parallel ranks have one graph too, in which attention with its exchange is one node."""
    mesh = context_mesh(mesh_of(1, 1, dist.get_world_size(), ulysses))
    model = GPT(GPTConfig(61, 8, 32, 1, 4, dropout=0.2), context_mesh=mesh)
    initialize(model, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(2):
        ids = integers(step, 2, 7, low=0, high=60, dtype=torch.int64)
        loss, gradients = _trained(model, ids, (7, step))
        compiled_loss, compiled_gradients = _trained(compiled, ids, (7, step))
        assert torch.equal(compiled_loss, loss)
        for found, expected in zip(compiled_gradients, gradients, strict=True):
            assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(compiled(ids), model(ids))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(2)
def test_layers_are_one_graph(sequence_parallel: bool) -> None:
    mesh = tensor_mesh()
    mlp = nn.Sequential(
        ColumnParallelLinear(
            12, 24, activation="swiglu", parts=2, sequence_parallel=sequence_parallel, device_mesh=mesh
        ),
        RowParallelLinear(12, 10, sequence_parallel=sequence_parallel, device_mesh=mesh),
    )
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    results = []
    for function in (mlp, compiled):
        x = normal(3, 2, 5, 12).requires_grad_()
        mlp.zero_grad()
        out = function(x)
        out.backward(normal(4, *out.shape))
        results.append([out.detach(), x.grad, *(_local(p.grad).clone() for p in mlp.parameters())])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@on_ranks(2)
def test_several_products_of_one_gather_are_one_graph() -> None:
    group, world = group_of(tensor_mesh()), 2

    def three(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        outs = all_gather_linear(x, [q, k, v], [None, bias, None], group, activation="gelu")
        return torch.cat(outs, -1)

    torch._dynamo.reset()
    compiled = torch.compile(three, fullgraph=True, backend="aot_eager")
    results = []
    for function in (three, compiled):
        leaves = [normal(i, *shape).requires_grad_() for i, shape in enumerate([(5, 8), (6, 8), (4, 8), (4, 8), (4,)])]
        leaves[3].requires_grad_(False)
        out = function(*leaves)
        assert out.shape == (5 * world, 14)
        out.backward(normal(9, *out.shape))
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)])
        assert leaves[3].grad is None
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
