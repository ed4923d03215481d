"""The kernels of ring attention within a model, interpreted: losses and gradients of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.context import Schedule
from tpfuse.parallel.initialize import initialize
from tpfuse.switches import use
from tpfuse.testing.ranks import pool

CONFIG = GPTConfig(vocab_size=31, n_positions=21, n_embd=32, n_layer=1, n_head=2, dropout=0.1)  # 21 tokens: padding


def _trained(cp: int, name: Implementation, schedule: Schedule) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and all gradients, summed over the context ranks."""
    model = GPT(CONFIG, context_mesh=mesh_of(1, 1, cp)["cp"] if cp > 1 else None, context_schedule=schedule)
    initialize(model, 0)
    ids, targets = torch.randint(31, (2, 2, 21), generator=torch.Generator().manual_seed(1))
    with use(implementation=name):
        loss = model(ids, targets, loss_weight=1 / targets.numel(), dropout_at=(1, 2))
        loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    for x in found.values():
        if cp > 1:
            dist.all_reduce(x)
    return found.pop("loss"), found


@pytest.mark.parametrize("schedule", exhaustive("ring", "all_gather"))
def test_a_model_trains_on_the_kernels_of_ring_attention(schedule: Schedule) -> None:
    loss, gradients = pool(1).run(_trained, 1, "auto", "auto")[0]
    for other_loss, other in pool(2).run(_trained, 2, "fused", schedule):
        torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)
