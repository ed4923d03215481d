"""At stage 3 ranks that do not run the same units raise at once and name the unit, and go on after that."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import mesh_of
from tests.support.tiers import STAGE_3_ABANDONS, exhaustive
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.layout import gather_whole
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import shard
from tpfuse.zero.optimizer import ZeroOptimizer
from tpfuse.zero.unit_order import UnitOrder

_COUNT = 3
_ALL = tuple(range(_COUNT))


class _Blocks(nn.Module):
    """Residual blocks of one size, of which a forward pass may run others, and a head without trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in _ALL)
        self.head = nn.Linear(6, 2, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: Tensor, order: tuple[int, ...] = _ALL, detached: int | None = None) -> Tensor:
        for index in order:
            y = torch.tanh(self.blocks[index](x))
            x = x + (y.detach() if index == detached else y)
        out: Tensor = self.head(x)
        return out


def _step(model: nn.Module, optimizer: ZeroOptimizer, rank: int, *how: object) -> None:
    model(normal(rank, 3, 6, dtype=torch.float64), *how).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "named", "replicas"),
    [
        # The other rank reduces units in another order, so that without a comparison those of one size are summed.
        (((0, 1),), "unit blocks.2 (blocks.2.weight, …)", 1),
        ((_ALL, 1), "reduce_scatter of unit blocks.1 (blocks.1.weight, …)", 2),
        *exhaustive(
            (((0, 2),), "unit blocks.1 (blocks.1.weight, …)", 2),
            (((0, 1, 1, 2),), "unit blocks.2 (blocks.2.weight, …)", 1),
        ),
    ],
)
@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=STAGE_3_ABANDONS)])
@on_ranks(2)
def test_a_unit_that_one_rank_runs_otherwise_is_named(
    how: tuple[object, ...], named: str, replicas: int, goes_on: bool
) -> None:
    """how: what rank 1 runs in the second step: the blocks in order, and the one whose output is detached."""
    results = []
    for fails in (False, True):
        model, rank = _Blocks(), dist.get_rank()
        optimizer = ZeroOptimizer(model, mesh_of(2, 1), stage=3, units=model.blocks, replicas=replicas, lr=1e-2)
        _step(model, optimizer, rank)
        if fails:
            with pytest.raises(Disagreement) as caught:
                _step(model, optimizer, rank, *(how if rank else ()))
            message = str(caught.value)
            assert named in message and "rank 0 runs" in message and "rank 1 runs" in message and "\n" not in message
            assert "or use stages 0 to 2" in message
            if not goes_on:
                return
            optimizer.engine.abandon()
            optimizer.zero_grad()
        _step(model, optimizer, rank)
        results.append([gather_whole(parameter).clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.exhaustive
@on_ranks(2)
def test_units_that_all_ranks_skip_or_repeat_train_as_on_one_rank() -> None:
    model, plain, rank = _Blocks(), _Blocks(), dist.get_rank()
    engine = shard(model, mesh_of(2, 1), stage=3, units=model.blocks)
    for order in (_ALL, (0, 2), (1,), (0, 1, 1, 2), (2, 1, 0), _ALL):
        engine.start(last=True)
        model(normal(rank, 3, 6, dtype=torch.float64), order).square().mean().backward()
        engine.finish()
        plain.zero_grad()
        sum(plain(normal(r, 3, 6, dtype=torch.float64), order).square().mean() for r in range(2)).backward()
        for member in engine.members:
            gradient = plain.get_parameter(member.name).grad
            expected = torch.zeros(1, dtype=torch.float64) if gradient is None else gradient.chunk(2)[rank]
            torch.testing.assert_close(member.gradient, expected.expand_as(member.gradient), rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_gpu_ranks_compare_whole_steps() -> None:
    order = UnitOrder([dist.group.WORLD], torch.device("cpu"), str, each=False)
    for step, units in enumerate([(0, 1), (1, 0), (0, 1), (0, 1 - dist.get_rank()), (0, 1)]):
        for unit in units:
            order.begin("reduce_scatter", unit)
        if step == 3:
            with pytest.raises(Disagreement, match=r"^stage 3: rank 0 and rank 1 have run other units in this step"):
                order.end("finish()")
        else:
            order.end("finish()")
