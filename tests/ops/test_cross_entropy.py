import pytest
import torch
import torch.distributed as dist

from tpfuse.comm.mesh import group_of, shard_range
from tpfuse.kernels import reference
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool


def _upcast(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return reference.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, target)


def _targets(rows: int, vocabulary: int) -> torch.Tensor:
    target = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))
    target[::5] = -1
    target[1], target[2] = 0, vocabulary - 1
    return target


def _against_reference(dtype: torch.dtype, vocabulary: int, scale: float) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = (slice(None), slice(*shard_range(vocabulary, rank, world)))
    logits, target = normal(1, 63, vocabulary, dtype=dtype) * scale, _targets(63, vocabulary)
    grad = normal(2, 63, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    yardstick = Yardstick(_upcast, {"logits": logits, "target": target}, grad)
    mine = logits[own].clone().requires_grad_()
    losses = cross_entropy(mine, target, vocabulary, group_of(tensor_mesh()))
    losses.backward(grad)
    yardstick.check("out", losses)
    yardstick.check("logits", mine.grad, own)
    assert torch.equal(losses[target == -1], torch.zeros_like(losses[target == -1]))
    assert torch.count_nonzero(mine.grad[target == -1]) == 0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 1000])
def test_against_reference(world: int, dtype: torch.dtype, vocabulary: int) -> None:
    pool(world).run(_against_reference, dtype, vocabulary, 1.0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1e-4, 1e4, 1e30])
def test_extreme_logits(world: int, scale: float) -> None:
    pool(world).run(_against_reference, torch.float32, 100, scale)


def _nothing_to_learn() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = shard_range(10, rank, world)
    logits = normal(4, 7, 10)[:, start:stop].clone().requires_grad_()
    losses = cross_entropy(logits, torch.full((7,), -1), 10, group_of(tensor_mesh()))
    losses.sum().backward()
    assert torch.equal(losses, torch.zeros(7))
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("world", [1, 2])
def test_all_ignored(world: int) -> None:
    pool(world).run(_nothing_to_learn)


def _errors() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = group_of(tensor_mesh())
    start, stop = shard_range(10, rank, world)
    logits, target = torch.zeros(3, stop - start), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"expected \[M, {stop - start}\] on rank {rank}"):
        cross_entropy(torch.zeros(3, stop - start + 1), target, 10, group)
    with pytest.raises(ValueError, match=r"logits \(3,\)"):
        cross_entropy(torch.zeros(3), target, 10, group)
    for wrong in (10, -2):
        with pytest.raises(ValueError, match="expected 0 to 9, or -1"):
            cross_entropy(logits, torch.tensor([0, wrong, 0]), 10, group)


@pytest.mark.parametrize("world", [1, 3])
def test_bad_input_is_refused(world: int) -> None:
    pool(world).run(_errors)
