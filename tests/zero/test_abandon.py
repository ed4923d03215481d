"""A step that failed on one rank or on all is abandoned, and training continues as if it had never begun."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import mesh_of
from tests.support.tiers import STAGE_3_ABANDONS, exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.layout import local_tensor
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import adamw, shard


class _Failure(RuntimeError):
    pass


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.fails: str = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.fails == "forward" and number == 2:
                raise _Failure
            x = torch.tanh(layer(x))
            if self.fails == "backward" and number == 1:
                x.register_hook(_fail)
        return x


def _fail(gradient: Tensor) -> Tensor:
    raise _Failure


def _engine(stage: int) -> tuple[_Model, Any, Any]:
    torch.manual_seed(0)
    model = _Model()
    mesh = mesh_of(dist.get_world_size(), 1)
    engine = shard(model, mesh, stage=stage, bucket_bytes=200, units=list(model.layers))
    return model, engine, adamw(engine)


def _step(model: _Model, engine: Any, seed: int, fails_in: Callable[[int], str]) -> None:
    for number in range(2):
        engine.start(last=number == 1)
        model.fails = fails_in(number)
        try:
            model(normal(2 * seed + number + 10 * dist.get_rank(), 3, 6)).square().sum().backward()
        finally:
            model.fails = ""
    engine.finish()


def _trained(stage: int, where: str, micro_batch: int, on_all_ranks: bool) -> list[Tensor]:
    """This rank's parameters after two steps, of which the second fails once before.

    micro_batch: -1 for another one on each rank.
    """
    micro_batch = dist.get_rank() if micro_batch < 0 else micro_batch
    model, engine, optimizer = _engine(stage)
    _step(model, engine, 0, lambda number: "")
    optimizer.step(1e-2)
    if where:
        failing = on_all_ranks or dist.get_rank() == 0
        with pytest.raises(_Failure if failing else (_Failure, PeerTimeout)):
            _step(model, engine, 1, lambda number: where if failing and number == micro_batch else "")
            raise _Failure  # no rank waited for gradients that rank 0 has not sent, so none of them noticed
        if micro_batch == 1 and failing:
            with pytest.raises(ValueError, match=r"after an error abandon\(\)"):
                engine.start(last=True)
        engine.abandon()
    _step(model, engine, 1, lambda number: "")
    optimizer.step(1e-2)
    return [local_tensor(parameter).clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("implementation", "stage", "where", "micro_batch", "on_all_ranks"),
    [
        ("direct", 0, "backward", 1, False),
        ("direct", 2, "forward", 1, False),
        pytest.param("direct", 3, "backward", 1, False, marks=STAGE_3_ABANDONS),
        ("collective", 2, "backward", -1, True),
        *exhaustive(
            ("collective", 1, "forward", -1, True),
            ("collective", 0, "backward", -1, True),
            ("fused", 1, "backward", 1, False),
            ("collective", 2, "backward", 1, False),
        ),
        pytest.param("direct", 3, "forward", 0, False, marks=[pytest.mark.exhaustive, STAGE_3_ABANDONS]),
    ],
)
@on_ranks(2)
def test_training_continues_after_an_abandoned_step(
    implementation: Implementation, stage: int, where: str, micro_batch: int, on_all_ranks: bool
) -> None:
    with use(implementation=implementation):
        runs = [_trained(stage, where, micro_batch, on_all_ranks), _trained(stage, "", 0, on_all_ranks)]
    assert all(torch.equal(failed, whole) for failed, whole in zip(*runs, strict=True))
