"""torch.compile(fullgraph=True) of the GPT: one graph, and the same numbers, by torch's kernels and by Triton's."""

import pytest
import torch
from torch import Tensor

from tpfuse.kernel_choice import Kernels, kernels
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers


def _trained(model: torch.nn.Module, ids: Tensor, at: tuple[int, int] | None) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of one step."""
    model.zero_grad()
    total = model(ids, ids.roll(-1, 1), loss_weight=0.1, dropout_at=at)
    total.backward()
    return total.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_one_graph_and_the_same_numbers(name: Kernels, dropout: float) -> None:
    model = GPT(GPTConfig(61, 8, 32, 1, 2, dropout=dropout))
    initialize(model, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with kernels(name):
        for step in range(3):  # other masks in every step, of one graph
            ids = integers(step, 2, 8, low=0, high=60, dtype=torch.int64)
            at = (7, step) if dropout else None
            loss, gradients = _trained(model, ids, at)
            compiled_loss, compiled_gradients = _trained(compiled, ids, at)
            assert torch.equal(compiled_loss, loss)
            for found, expected in zip(compiled_gradients, gradients, strict=True):
                assert torch.equal(found, expected)
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_logits_and_losses(name: Kernels) -> None:
    model = GPT(GPTConfig(61, 8, 32, 1, 2))
    initialize(model, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = integers(1, 2, 8, low=0, high=60, dtype=torch.int64)
    with kernels(name), torch.no_grad():
        assert torch.equal(compiled(ids), model(ids))
        assert torch.equal(compiled(ids, ids), model(ids, ids))
