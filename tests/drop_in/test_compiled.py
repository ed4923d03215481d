"""torch.compile of a parallelized model: no graph break, two graphs for all lengths, and the numbers of eager code."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tpfuse
from tests.support.decoders import decoder
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import build_mesh
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import pool

DROPS = {"resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.1}
LENGTHS = 13, 17, 24  # shards with padding and without


def _step(model: Any, forward: Any, ids: Tensor) -> list[Tensor]:
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = forward(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(local_tensor(p.grad).clone() for p in model.parameters())]


def _compared(family: str, layout: dict[str, int], options: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    """Return how often the graph broke, the number of graphs, and the largest difference to eager at each length."""
    model = decoder(family, num_hidden_layers=1, **settings)
    tpfuse.parallelize(model, build_mesh("cpu", **{"dp": 1, "tp": 1, **layout}), **options)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    differences = []
    for length in LENGTHS:
        ids = integers(length, 2, length, low=3, high=100, dtype=torch.int64)
        pairs = zip(_step(model, compiled, ids), _step(model, model, ids), strict=True)
        differences.append(max(float((x - y).abs().max()) for x, y in pairs if x.numel()))
    return [sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], differences]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout", "options", "settings"),
    [
        ("gpt2", {"tp": 2}, {}, DROPS),
        ("llama", {"tp": 2}, {"sequence_parallel": False}, {}),
        ("llama", {"cp": 2}, {}, {}),
        ("bitnet", {"tp": 2}, {}, {}),
    ],
)
def test_two_graphs_compute_the_numbers_of_eager_code(
    family: str, layout: dict[str, int], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    for breaks, graphs, differences in pool(2).run(_compared, family, layout, options, settings):
        assert breaks == 0
        assert graphs == 2  # of the first length, and of all others
        assert differences == [0.0] * len(LENGTHS)
