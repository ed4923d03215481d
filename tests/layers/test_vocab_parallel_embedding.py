"""VocabParallelEmbedding: the embedding and the projection with its weight, parameters, refusals."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.comm.mesh import shard_range
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def _tied(dtype: torch.dtype, table: int, sequence_parallel: bool, gather: bool) -> None:
    """Embed tokens, square and project them: the gradient of the weight contains both of its uses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options = {"sequence_parallel": sequence_parallel, "device_mesh": tensor_mesh(), "dtype": dtype}
    layer = VocabParallelEmbedding(table, 63, **options)
    # So many that plain torch's largest error among them is a useful bound, also with a table of two rows.
    tokens = 40 * world
    ids = torch.randint(table, (tokens,), generator=torch.Generator().manual_seed(1))
    grad = normal(2, tokens, table, dtype=dtype)
    inputs = {"weight": layer.weight.full_tensor().detach()}
    expected = Expected(lambda weight: F.linear(F.embedding(ids, weight).square(), weight), inputs, grad)
    x = layer(ids)
    assert x.shape == (40 if sequence_parallel else tokens, 63)
    own = (slice(None), slice(None) if gather else slice(*shard_range(table, rank, world)))
    logits = layer.project(x.square(), gather_output=gather)
    logits.backward(grad[own])
    expected.check("out", logits, own)
    assert isinstance(layer.weight.grad, DTensor)
    slices = tuple(slice(start, stop) for start, stop in local_slices(layer.weight))
    expected.check("weight", local_tensor(layer.weight.grad), slices)


@pytest.mark.parametrize(("world", "dtype"), [(2, BF16), (3, F32), *exhaustive((4, F64))])
@on_ranks("world")
def test_embedding_and_projection_match_the_reference(dtype: torch.dtype) -> None:
    for case in itertools.product((2, 63, 100), (False, True), (False, True)):
        with naming(case):
            _tied(dtype, *case)


@on_ranks(2)
def test_the_sequence_of_a_batch_is_sharded() -> None:
    """Check that logits and loss of [2, tokens] are those of one rank, for both dimensions of the sequence."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dim in (-2, 0):
        layer = VocabParallelEmbedding(
            63, 9, sequence_parallel=True, sequence_dim=dim, device_mesh=tensor_mesh(), dtype=F64
        )
        whole, ids = layer.weight.full_tensor(), torch.arange(6 * world).view(2, 3 * world)
        own: Any = slice(3 * rank, 3 * rank + 3)
        ids, own = (ids.t(), own) if dim == 0 else (ids, (slice(None), own))
        logits = whole[ids] @ whole.t()
        x = whole[ids][own]
        assert torch.equal(layer(ids), x)
        torch.testing.assert_close(layer.project(x, gather_output=True), logits, rtol=1e-12, atol=1e-12)
        expected = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum") / 7
        torch.testing.assert_close(layer.loss(x, ids, 1 / 7), expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match=r"loss: target has shape \(\d, \d\): expected \(\d, \d\), as x has"):
            layer.loss(x, ids.t(), 1 / 7)


@on_ranks(2)
def test_a_table_that_fully_shard_has_not_gathered_is_refused() -> None:
    layer = VocabParallelEmbedding(8, 4)
    fully_shard(layer, mesh=tensor_mesh())
    with pytest.raises(ValueError, match=r"weight is on .*: expected None, the mesh of its layer; fully_shard gathers"):
        layer.project(torch.zeros(2, 4))
    register_fsdp_forward_method(layer, "project")
    assert layer.project(torch.zeros(2, 4)).shape == (2, 8)


@on_ranks(2)
def test_padding_is_zero_and_gets_no_gradient() -> None:
    mesh, world = tensor_mesh(), dist.get_world_size()
    ids = torch.arange(30 * world) % 9
    # These rows are on the first rank and, with two ranks, next to the boundary of their shards.
    for padding_idx in (0, 4, -1):
        for sequence_parallel in (False, True):
            layer = VocabParallelEmbedding(
                9, 5, padding_idx, sequence_parallel=sequence_parallel, device_mesh=mesh, dtype=F64
            )
            plain = nn.Embedding(9, 5, padding_idx, dtype=F64)
            assert layer.padding_idx == plain.padding_idx and f"padding_idx={plain.padding_idx}" in repr(layer)
            plain.weight.data.copy_(layer.weight.full_tensor())
            assert (plain.weight == 0).all(1).nonzero().tolist() == [[plain.padding_idx]]
            plain(ids).exp().sum().backward()  # the gradient of exp at the row of zeros is 1
            layer(ids).exp().sum().backward()
            assert plain.weight.grad is not None and isinstance(layer.weight.grad, DTensor)
            torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.weight.grad, rtol=1e-14, atol=1e-14)


def _from_embedding() -> None:
    mesh = tensor_mesh() if dist.is_initialized() else None
    plain = nn.Embedding(9, 5, padding_idx=-2, dtype=torch.bfloat16)
    plain.weight.data.copy_(normal(1, 9, 5))
    for frozen in (False, True):
        plain.requires_grad_(not frozen)
        layer = VocabParallelEmbedding.from_embedding(plain, sequence_dim=0, device_mesh=mesh)
        whole = layer.weight.full_tensor() if isinstance(layer.weight, DTensor) else layer.weight
        assert torch.equal(whole, plain.weight) and layer.weight.requires_grad != frozen
        assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx, layer.sequence_dim) == (9, 5, 7, 0)
        assert not layer.sequence_parallel and layer.weight.dtype == torch.bfloat16


def test_layers_made_from_embeddings_compute_the_same() -> None:
    _from_embedding()
    pool(2).run(_from_embedding)


def test_embeddings_with_unsupported_options_are_refused() -> None:
    for name, value in (("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)):
        with pytest.raises(ValueError, match=rf"embedding has {name}={value}: expected (None|False)"):
            VocabParallelEmbedding.from_embedding(nn.Embedding(9, 5, **{name: value}))
    with pytest.raises(
        ValueError, match=r"VocabParallelEmbedding\.from_embedding\(torch\.nn\.Embedding\.from_pretrained"
    ):
        VocabParallelEmbedding.from_pretrained(torch.zeros(9, 5))
    for padding_idx in (9, -10):
        with pytest.raises(ValueError, match=rf"padding_idx {padding_idx}: expected -9 to 8, or None"):
            VocabParallelEmbedding(9, 5, padding_idx)


@on_ranks(2)
def test_bad_arguments_are_refused() -> None:
    layer = VocabParallelEmbedding(63, 9, sequence_parallel=True, device_mesh=tensor_mesh())
    with pytest.raises(ValueError, match="ids between 0 and 63 do not fit a table of 63 rows"):
        layer(torch.tensor([0, 63]))
    with pytest.raises(ValueError, match="3 rows cannot be split among 2 ranks"):
        layer(integers(1, 3, low=0, dtype=torch.int64))
    for dim in (-3, -1, 1, 2):
        layer.sequence_dim = dim
        for call in (lambda: layer(torch.zeros(4, dtype=torch.int64)), lambda: layer.project(torch.zeros(4, 9))):
            with pytest.raises(ValueError, match=rf"sequence_dim {dim}: the input has shape \(4, .\): expected one of"):
                call()
