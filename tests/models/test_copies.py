"""Layers and models can be copied and saved as any module: by copy.deepcopy, averages of weights and torch.save."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.cases import naming
from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.comm.layout import local_tensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import shard
from tpfuse.zero.bucket_updater import BucketUpdater

Loss = Callable[[nn.Module], Tensor]


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _gradients(model: nn.Module, loss: Loss) -> list[Tensor]:
    """Return the loss and this rank's gradients."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    found = [value.detach()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(local_tensor(parameter.grad).clone())
    return found


def _check_copy(copied: nn.Module, model: nn.Module, loss: Loss) -> None:
    """Check that the copy computes the same results as the model, with parameters of its own."""
    for found, expected in zip(_gradients(copied, loss), _gradients(model, loss), strict=True):
        assert torch.equal(found, expected)
    kept = [local_tensor(p).clone() for p in model.parameters()]
    for parameter in copied.parameters():
        local_tensor(parameter).fill_(3.0)
    assert all(torch.equal(local_tensor(p), before) for p, before in zip(model.parameters(), kept, strict=True))


def _check_average(model: nn.Module) -> None:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    before = [local_tensor(p).clone() for p in model.parameters()]
    for parameter in model.parameters():
        local_tensor(parameter).mul_(3.0)
    average.update_parameters(model)
    for parameter, expected in zip(average.module.parameters(), before, strict=True):
        torch.testing.assert_close(local_tensor(parameter), 2 * expected)


def _check(model: nn.Module, loss: Loss) -> None:
    for copied in (copy.deepcopy(model), _saved(model)):
        _check_copy(copied, model, loss)
    _check_average(model)


def _layers() -> Iterator[tuple[nn.Module, Tensor]]:
    """Return every layer that has parameters, with an input of this rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = tensor_mesh() if world > 1 else None
    ids = torch.arange(4 * world).view(2, -1) % 9
    shard = normal(rank, 2, 4, 6)
    yield ColumnParallelLinear(6, 8, activation="gelu", sequence_parallel=True, device_mesh=mesh), shard
    yield RowParallelLinear(6 * world, 8, sequence_parallel=True, device_mesh=mesh), normal(rank, 2, 4 * world, 6)
    yield VocabParallelEmbedding(9, 6, 2, sequence_parallel=True, device_mesh=mesh), ids
    yield PositionEmbedding(9, 6, sequence_parallel=True, device_mesh=mesh), ids
    yield LayerNorm(6, sequence_parallel=True, device_mesh=mesh), shard
    yield RMSNorm(6, sequence_parallel=True, device_mesh=mesh), shard


def _every_layer() -> None:
    for layer, x in _layers():
        with naming(layer):
            _check(layer, lambda each, x=x: each(x).square().sum())  # type: ignore[misc]


def test_layers_of_one_rank_can_be_copied() -> None:
    _every_layer()


def test_layers_of_two_ranks_can_be_copied() -> None:
    pool(2).run(_every_layer)


def _gpt(dp: int, tp: int, cp: int) -> tuple[GPT, Loss]:
    mesh = mesh_of(dp, tp, cp)
    model = parallelize_gpt(GPT(GPTConfig(61, 8, 32, 1, 4)), mesh)
    initialize(model, 1)
    ids = integers(1, 2, 8, low=0, high=60, dtype=torch.int64)
    return model, lambda each: each(ids, ids.roll(-1, 1), loss_weight=0.1)


@on_ranks(2)
def test_the_gpt_can_be_copied() -> None:
    for tp, cp in ((2, 1), (1, 2)):
        with naming((tp, cp)):
            _check(*_gpt(1, tp, cp))


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(2)
def test_a_copy_of_a_model_with_buckets_has_none(tp: int) -> None:
    """Check that the buckets of a model do not manage its copy."""
    dp, stage = dist.get_world_size() // tp, 2
    model, loss = _gpt(dp, tp, 1)
    buckets = shard(model, mesh_of(dp, tp), stage=stage)
    optimizer = BucketUpdater(buckets)
    for _ in range(2):
        plain, _ = _gpt(dp, tp, 1)
        for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
            local_tensor(parameter).copy_(local_tensor(other))
        for copied in (copy.deepcopy(model), _saved(model)):
            assert all(parameter.grad is None for parameter in copied.parameters())
            _check_copy(copied, plain, loss)
        average = AveragedModel(model)
        buckets.start(last=True)
        loss(model).backward()
        buckets.finish()
        optimizer.step(1e-2)
        average.update_parameters(model)
        for parameter, other in zip(average.module.parameters(), model.parameters(), strict=True):
            assert torch.equal(local_tensor(parameter), local_tensor(other))
    again = shard(model, mesh_of(dp, tp), stage=stage)
    assert [bucket.layout for bucket in again.buckets] == [bucket.layout for bucket in buckets.buckets]
