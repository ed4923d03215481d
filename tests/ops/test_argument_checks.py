"""Arguments that no operator can take: one line names operator, argument, received value and accepted values."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from tests.support.meshes import tensor_mesh
from tpfuse.comm import collectives
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.ops import collectives as differentiable
from tpfuse.ops.attention import attention
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.ops.embedding import embedding
from tpfuse.ops.gemm import gemm
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.testing.ranks import on_ranks

Call = Callable[[], object]


def _autocast(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear_all_reduce(x, weight, None, group)


def _table() -> list[tuple[Call, str]]:
    mesh = tensor_mesh()
    assert mesh is not None
    group = dist.group.WORLD
    assert group is not None
    x, w, heads = torch.ones(2, 4), torch.ones(6, 4), torch.ones(1, 2, 4, 8)
    ids, scalar = torch.zeros(2, dtype=torch.int64), torch.tensor(1.0)
    dtensor = DTensor.from_local(x, mesh, [Replicate()])
    dtensor_ids = DTensor.from_local(ids, mesh, [Replicate()])
    dtensor_heads = DTensor.from_local(heads, mesh, [Replicate()])
    no_mesh, no_group = "expected a one-dimensional DeviceMesh, or None for one rank", "expected its get_group()"
    is_dtensor = "is a DTensor: expected this rank's part of it"
    given: list[tuple[Call, str]] = [
        (lambda: ColumnParallelLinear(4, 4, device_mesh="tp"), f"device_mesh is 'tp': {no_mesh}"),  # type: ignore[arg-type]
        (lambda: RowParallelLinear(4, 4, device_mesh=group), f"device_mesh is a ProcessGroup: {no_mesh}"),  # type: ignore[arg-type]
        (lambda: ColumnParallelLinear(4, 4, parts=0), "parts 0: expected at least 1"),
        (lambda: LayerNorm([2, 4]), r"normalized_shape [2, 4]: expected the last dimension alone"),
        (lambda: ring_attention(heads, heads, heads, group=None), "ring_attention: group is None: expected a process"),  # type: ignore[call-overload]
        (lambda: ring_attention(heads, heads, heads, group=mesh), f"ring_attention: group is a DeviceMesh: {no_group}"),  # type: ignore[call-overload]
        (lambda: ring_attention(dtensor_heads, heads, heads, group=group), f"ring_attention: q {is_dtensor}"),
        (lambda: attention(heads, dtensor_heads, heads), f"attention: k {is_dtensor}"),
        (lambda: layer_norm(dtensor, w[0], None, 1e-5), f"layer_norm: x {is_dtensor}"),
        (
            lambda: layer_norm(x, w[0], None, 1e-5, sum_gradients_over=mesh),
            f"layer_norm: group is a DeviceMesh: {no_group}",
        ),  # type: ignore[arg-type]
        (lambda: gemm(x, w[:4], residual=dtensor), f"gemm: residual {is_dtensor}"),
        (lambda: _autocast(x.double(), w, group), "linear_all_reduce: weight is torch.float32, x is torch.float64"),
        (lambda: _autocast(x, w.double(), group), "linear_all_reduce: weight is torch.float64, x is torch.float32"),
        (lambda: embedding(ids, x, 4, mesh), f"embedding: group is a DeviceMesh: {no_group}"),  # type: ignore[arg-type]
        (lambda: cross_entropy(dtensor, ids, 8, group), f"cross_entropy: logits {is_dtensor}"),
        (lambda: linear_cross_entropy(x, w, dtensor_ids, 12, group), f"linear_cross_entropy: target {is_dtensor}"),
        (lambda: PositionEmbedding(6, 4, device_mesh=mesh)(dtensor_ids), f"position_embedding: input {is_dtensor}"),
        (lambda: linear_cross_entropy(x, w, ids, 12, mesh), "linear_cross_entropy: group is a DeviceMesh"),  # type: ignore[arg-type]
    ]
    for product in (linear_all_reduce, linear_reduce_scatter, all_gather_linear):
        name = product.__name__
        given.append((lambda f=product: f(x, w, None, mesh), f"{name}: group is a DeviceMesh: {no_group}"))  # type: ignore
        given.append((lambda f=product: f(dtensor, w, None, group), f"{name}: x {is_dtensor}"))  # type: ignore[misc]
    for function in (differentiable.all_gather, differentiable.replicate, differentiable.split_last):
        given.append((lambda f=function: f(x, mesh), f"{function.__name__}: group is a DeviceMesh: {no_group}"))  # type: ignore
    for collective in (collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all):
        name = collective.__name__
        given.append((lambda f=collective: f(scalar, group), f"{name}: x has shape (): expected at least one"))  # type: ignore
    for collective in (collectives.all_gather, collectives.all_reduce, collectives.all_reduce_max):
        name = collective.__name__
        given.append((lambda f=collective: f(dtensor, group), f"{name}: x {is_dtensor}"))  # type: ignore[misc]
        given.append((lambda f=collective: f(x, "tp"), f"{name}: group is 'tp': expected a process group, or None"))  # type: ignore
    return given


@on_ranks(2)
def test_each_is_refused_in_one_line() -> None:
    for call, message in _table():
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value) and "\n" not in str(caught.value)
