"""Data-parallel replicas of a pipeline may use different parameters: no rank waits for a gradient that never comes.

`ZeroOptimizer` clips, and updates with the mean gradient over the labels of all ranks.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.parallel.pipeline.pipeline import Pipeline
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero.optimizer import ZeroOptimizer

BLOCKS, WIDTH, ROWS, MICRO_BATCHES = 16, 6, 3, 4


class Block(nn.Module):
    """user: the replica that uses the parameter `seldom`. replica: the one that computes now."""

    replica: int

    def __init__(self, user: int) -> None:
        super().__init__()
        self.user, self.linear, self.seldom = user, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x * self.seldom if self.replica == self.user else x


def model_of(replica: int) -> nn.Sequential:
    """Return the blocks of four stages, of which two replicas use `seldom` in turn.

    The last two blocks of a stage, whose gradients arrive first, are complete first on replica 0 in stages 0 and 2, and
    on replica 1 in the others. The first two blocks are complete first on the other replica.
    """
    torch.manual_seed(1)
    blocks = nn.Sequential(*(Block((index // 4 + (index % 4 < 2)) % 2) for index in range(BLOCKS))).double()
    return computing(blocks, replica)


def computing(blocks: nn.Sequential, replica: int) -> nn.Sequential:
    for block in blocks:
        block.replica = replica  # type: ignore[assignment]
    return blocks


def loss(x: Tensor, _: Tensor, labelled: Tensor) -> Tensor:
    """Return the sum of the losses of the labelled rows."""
    return (x.sin().sum(1) * labelled).sum()


def batches_of(step: int, replica: int) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a replica, which have different numbers of labels, the first one none."""
    return [
        (normal(100 * step + 10 * replica + number, ROWS, WIDTH).double(), torch.arange(ROWS) < number * (1 + replica))
        for number in range(MICRO_BATCHES)
    ]


@pytest.mark.parametrize(("zero", "schedule"), [(2, "interleaved_1f1b"), (3, "zbv"), *exhaustive((2, "zero_bubble"))])
@on_ranks(4)
def test_replicas_that_use_other_parameters_train_like_one_process(zero: int, schedule: str) -> None:
    mesh = mesh_of(2, 1, pp=2)
    replica = mesh.get_local_rank("dp")
    model, whole = model_of(replica), model_of(0)
    pipeline = Pipeline(
        model,
        embed=lambda x, labelled: x,
        blocks=model,
        head=loss,
        device_mesh=mesh["pp"],
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=MICRO_BATCHES,
        stages_per_rank=2,
    )
    optimizer = ZeroOptimizer(
        model,
        mesh,
        stage=zero,
        units=pipeline.blocks,
        shared=pipeline.shared,
        bucket_bytes=4,
        lr=0.01,
        weight_decay=0.0,
    )
    engine = optimizer.engine
    if zero < 3:
        assert len(engine.buckets) == 3 * BLOCKS // 2, (
            "each stage has more buckets than the reducer has buffers, so ranks wait"
        )
    torchs = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.0, foreach=False)
    for step in range(2):
        batches = [batches_of(step, each) for each in (0, 1)]
        labels = [[int(labelled.sum()) for _, labelled in of_replica] for of_replica in batches]
        assert labels == [[0, 1, 2, 3], [0, 2, 3, 3]]
        optimizer.zero_grad()
        pipeline.step(batches[replica], engine)
        for number in labels[replica]:
            optimizer.divide_by(number)
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        torchs.zero_grad()
        for each in (0, 1):
            for x, labelled in batches[each]:
                (loss(computing(whole, each)(x), x, labelled) / sum(labels[0] + labels[1])).backward()
        expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        assert expected_norm > 0.1 and (norm / expected_norm - 1).abs() <= 1e-12
        torchs.step()
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name).detach()
            part = tuple(slice(*each) for each in local_slices(parameter))
            assert (local_tensor(parameter) - expected[part]).abs().amax() <= 1e-12, name
