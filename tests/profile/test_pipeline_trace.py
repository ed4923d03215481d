"""A trace of a pipeline attributes the time that a stage waits for another one to the rank that is late."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.parallel.pipeline.pipeline import Pipeline
from tpfuse.profile.recording import record
from tpfuse.profile.summary import summarise
from tpfuse.profile.trace_files import read_traces
from tpfuse.testing.ranks import pool

DELAY, MICRO_BATCHES, STEPS = 0.05, 4, 2  # seconds of each forward pass of the late rank


class _Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def _record(folder: Path, late: int) -> None:
    model = nn.Sequential(*(_Block(DELAY * (rank == late)) for rank in range(2)))
    pipeline = Pipeline(
        model,
        embed=lambda x: x,
        blocks=model,
        head=lambda x, _: x.sum(),
        device_mesh=mesh_of(1, 1, pp=2)["pp"],
        micro_batches=MICRO_BATCHES,
    )
    batches = [(torch.ones(2, 8),)] * MICRO_BATCHES
    pipeline.step(batches)  # the routes are open then
    with record(folder, model, dist.group.WORLD, layout={"pp": 2}) as step:
        for _ in range(STEPS):
            with step():
                pipeline.step(batches)


@pytest.mark.parametrize("late", [0, *exhaustive(1)])
def test_a_delay_between_stages_is_attributed_to_its_rank(late: int, tmp_path: Path) -> None:
    """Other programs may delay a rank as well, whenever they run: so one of several recordings must be undisturbed."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        pool(2).run(_record, folder, late)
        try:
            document = summarise(read_traces(folder))
            waits = document["wait_matrix"]
            assert waits[1 - late][late] == pytest.approx(MICRO_BATCHES * DELAY, rel=0.25)
            assert waits[late][1 - late] < DELAY / 2
            return
        except AssertionError:
            if attempt == 4:
                raise
