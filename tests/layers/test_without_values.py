"""Tensors without values, on the meta device or under FakeTensorMode: results have the right shapes, without a message.

Only one rank of two calls the operators and layers: if one communicated, it would wait for the other rank.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.cases import naming
from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.comm.layout import has_values
from tpfuse.comm.mesh import group_of
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.ops import collectives
from tpfuse.ops.activation import ACTIVATIONS, activation
from tpfuse.ops.attention import attention
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.ops.dropout import dropout, dropout_keys
from tpfuse.ops.embedding import embedding
from tpfuse.ops.gemm import gemm
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.ops.rms_norm import rms_norm
from tpfuse.testing.ranks import on_ranks


@contextlib.contextmanager
def _made(how: str) -> Iterator[torch.device]:
    """Yield the device on which tensors are created without values within the block."""
    if how == "meta":
        yield torch.device("meta")
    else:
        with FakeTensorMode():
            yield torch.device("cpu")


def _is(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    assert tuple(x.shape) == shape and x.dtype == dtype and not has_values(x)


def _floats(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(*shape, device=device, requires_grad=True)


def _operators(device: torch.device, group: dist.ProcessGroup | None) -> None:
    world = 1 if group is None else group.size()
    x, w, b = _floats(device, 4, 6), _floats(device, 8, 6), _floats(device, 8)
    ids = torch.empty(4, dtype=torch.int64, device=device)
    _is(activation(x, "gelu"), 4, 6)
    for name in ACTIVATIONS:
        _is(gemm(x, w, b, activation=name), 4, 4 if name in ("swiglu", "geglu") else 8)
        _is(all_gather_linear(x, w, b, group, activation=name), 4 * world, 4 if name in ("swiglu", "geglu") else 8)
    _is(linear_reduce_scatter(x, w, b, group), 4 // world, 8)
    _is(linear_all_reduce(x, w, b, group), 4, 8)
    _is(layer_norm(x, w[0], None, 1e-5, sum_gradients_over=group), 4, 6)
    _is(rms_norm(x, w[0], 1e-5, sum_gradients_over=group), 4, 6)
    table = _floats(device, 10 // world, 6)
    _is(embedding(ids, table, 10, group, scatter=True, padding_idx=1), 4 // world, 6)
    _is(cross_entropy(_floats(device, 4, 10 // world), ids, 10, group), 4)
    total, each = linear_cross_entropy(x, table, ids, 10, group)
    _is(total)
    _is(each, 4)
    _is(dropout(x, 0.5, ids, dropout_keys(x, 1, 2, 3)[0]), 4, 6)
    q, k = _floats(device, 2, 4, 6, 16), _floats(device, 2, 2, 6, 16)
    _is(attention(q, k, k), 2, 4, 6, 16)
    _is(attention(q, k, k, window=3, return_lse=True)[1], 2, 4, 6)


def _communicating(device: torch.device, group: dist.ProcessGroup, pair: Any) -> None:
    x = _floats(device, 4, 6)
    _is(collectives.all_gather(x, group), 8, 6)
    _is(collectives.reduce_scatter(x, group), 2, 6)
    _is(collectives.all_reduce(x, group), 4, 6)
    _is(collectives.replicate(x, group), 4, 6)
    _is(collectives.all_to_all(_floats(device, 2, 6), group), 2, 6)
    _is(collectives.gather_last(x, group), 4, 12)
    _is(collectives.split_last(x, group), 4, 3)
    q, k = _floats(device, 2, 4, 6, 16), _floats(device, 2, 2, 6, 16)
    for schedule in ("auto", "ring", "all_gather", "ulysses", "ulysses_ring"):
        groups = pair if schedule == "ulysses_ring" else group
        out, lse = ring_attention(q, k, k, group=groups, schedule=schedule, return_lse=True)  # type: ignore[arg-type]
        _is(out, 2, 4, 6, 16)
        _is(lse, 2, 4, 6)
        out.sum().backward()
        assert q.grad is not None
        _is(q.grad, 2, 4, 6, 16)


def _layers(device: torch.device, mesh: Any) -> None:
    world = 1 if mesh is None else mesh.size()
    where: dict[str, Any] = {"device_mesh": mesh, "device": device}
    x, ids = _floats(device, 2, 4, 6), torch.empty(2, 4 * world, dtype=torch.int64, device=device)
    column = ColumnParallelLinear(6, 8, sequence_parallel=True, **where)
    _is(column(x), 2, 4 * world, 8 // world)
    _is(ColumnParallelLinear(6, 8, gather_output=True, **where)(x), 2, 4, 8)
    _is(RowParallelLinear(8, 6, sequence_parallel=True, **where)(column(x)), 2, 4, 6)
    _is(RowParallelLinear(6, 8, input_is_parallel=False, **where)(x), 2, 4, 8)
    for norm in (LayerNorm, RMSNorm):
        _is(norm(6, sequence_parallel=True, **where)(x), 2, 4, 6)
        _is(norm(6, elementwise_affine=False, **where)(x), 2, 4, 6)
    wte = VocabParallelEmbedding(13, 6, 1, sequence_parallel=True, **where)
    _is(wte(ids), 2, 4, 6)
    _is(wte.project(x, gather_output=True), 2, 4 * world, 13)
    _is(wte.loss(x, ids, 0.1))
    _is(PositionEmbedding(9, 6, sequence_parallel=True, **where)(ids), 2, 4 * world, 6)
    _is(ColumnParallelLinear.from_linear(nn.Linear(6, 8, device=device), device_mesh=mesh)(x), 2, 4, 8 // world)
    model = parallelize_gpt(GPT(GPTConfig(61, 8, 32, 1, 4), device=device), mesh)
    _is(model(ids), 2, 4 * world, 61)
    loss = model(ids, ids, loss_weight=0.1)
    _is(loss)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape and not has_values(parameter.grad)


@pytest.mark.parametrize("how", ["meta", "fake"])
@on_ranks(2)
def test_ranks_of_a_group_do_not_communicate(how: str) -> None:
    mesh = tensor_mesh()
    other = mesh_of(1, 2)
    group, pair = group_of(mesh), (other["dp"].get_group(), other["tp"].get_group())
    assert group is not None
    if dist.get_rank():
        return
    with _made(how) as device:
        for check, arguments in ((_operators, (group,)), (_communicating, (group, pair)), (_layers, (mesh,))):
            with naming(check.__name__):
                check(device, *arguments)  # type: ignore[operator]


@pytest.mark.parametrize("how", ["meta", "fake"])
def test_one_rank_returns_the_shapes(how: str) -> None:
    with _made(how) as device:
        _operators(device, None)
        _layers(device, None)
