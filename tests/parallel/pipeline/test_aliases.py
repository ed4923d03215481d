"""Tensors that are one memory keep their values: a stage may return its input, and weights may have one gradient."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.parallel.pipeline.pipeline import Pipeline
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks

WIDTH, ROWS, MICRO_BATCHES = 4, 3, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Linear(Layer):
    """Its result may be overwritten, since no gradient needs it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class InPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0).relu_()).sub_(0.5)


class Sums(nn.Module):
    """The gradients of `weight` and `change` are one tensor, and those of `here` and `there` are that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.change = (nn.Parameter(torch.rand(WIDTH, WIDTH)) for _ in range(2))
        self.here, self.there = (nn.Parameter(torch.rand(ROWS, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.change) + self.here + self.there


class Twice(nn.Module):
    """`weight` is used with `first` and with `second`. `total` has one number as gradient of all its elements.

    The gradient of `table` is sparse: it has no memory of the usual kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.total = (nn.Parameter(torch.rand(WIDTH)) for _ in range(3))
        self.weight, self.table = nn.Parameter(torch.rand(WIDTH, WIDTH)), nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.weight, self.first))
        x = nn.functional.linear(x, self.weight, self.second) + self.table(torch.arange(ROWS))
        return x + self.total.sum()


class Around(Layer):
    """`norm` is used before and after `linear`, whose weight is computed with in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + super().forward(self.norm(x)))  # type: ignore[no-any-return]


class Recomputed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Reshaped(Layer):
    """The gradient of `flat` is a view of the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.rand(ROWS * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.flat.view(ROWS, WIDTH)


class Model(nn.Module):
    def __init__(self, blocks: list[type[nn.Module]]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.blocks, self.head = Layer(), nn.Sequential(*(block() for block in blocks)), Layer()
        self.double()

    def loss(self, x: Tensor, _: Tensor) -> Tensor:
        return self.head(x).square().sum()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.blocks(self.embed(x)), x)


def pipeline_of(model: Model, pp: int = 2, **options: Any) -> Pipeline:
    options = {"head": (model.loss, [model.head]), "layers": [1] * len(model.blocks)} | options
    mesh = mesh_of(1, 1, pp=pp)["pp"] if pp > 1 else None
    return Pipeline(
        model, embed=model.embed, blocks=model.blocks, device_mesh=mesh, micro_batches=MICRO_BATCHES, **options
    )


def batches() -> list[tuple[Tensor]]:
    return [(normal(number, ROWS, WIDTH).double(),) for number in range(MICRO_BATCHES)]


def check(blocks: list[type[nn.Module]], **options: Any) -> None:
    """Compare the losses and gradients of a pipeline's step with those of the whole model."""
    model = Model(blocks)
    whole, pipeline = copy.deepcopy(model), pipeline_of(model, **options)
    losses = [whole(*batch) for batch in batches()]
    torch.stack(losses).sum().backward()
    found = [pipeline.forward(batches()), pipeline.step(batches())]
    for each in found:
        expected_losses = [loss.detach() for loss in losses] if pipeline.has_last else []
        torch.testing.assert_close(each, expected_losses, rtol=1e-12, atol=0.0)
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None, name
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2)
def test_outputs_of_a_last_stage_that_returns_its_input_stay() -> None:
    model = Model([Layer, nn.Identity])
    whole = copy.deepcopy(model)
    pipeline = pipeline_of(model, head=(lambda x, _: {"x": x, "rows": (x[0], x[1:])}, [model.head]))
    for found, batch in zip(pipeline.forward(batches()), batches(), strict=pipeline.has_last):
        x = whole.blocks(whole.embed(*batch))
        assert all(map(torch.equal, (found["x"], *found["rows"]), (x, x[0], x[1:])))  # type: ignore[call-overload]


@on_ranks(2)
def test_a_stage_that_returns_its_input_to_another_stage_of_its_rank() -> None:
    """Under zbv stages 1 and 2 have one rank, and a message for one of them is released before the other has ended."""
    check([Layer, Layer, nn.Identity, Layer], schedule="zbv")


@pytest.mark.parametrize("block", [Sums, Twice, Around, Recomputed])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
def test_gradients_that_weights_share_are_counted_once(block: type[nn.Module], schedule: str) -> None:
    check([block, block], pp=1, schedule=schedule, stages_per_rank=2)


@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive("zero_bubble")])
@on_ranks(2)
def test_a_gradient_in_the_memory_of_a_message_stays(schedule: str) -> None:
    check([Reshaped, Reshaped], schedule=schedule)


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 2), ("zero_bubble", 1), *exhaustive(("zbv", 2), ("gpipe", 2))])
@on_ranks("pp")
def test_a_stage_may_begin_and_end_with_an_operation_in_place(schedule: str, pp: int) -> None:
    stages = 1 if schedule in ("1f1b", "gpipe") else 2
    check([Linear, *[InPlace] * (pp * stages - 1)], pp=pp, schedule=schedule, stages_per_rank=stages)
