"""Features that only all_gather_linear has: several weights for one gather, and ranks without rows of the weight.

test_parallel_products.py compares the results and gradients of all products with plain torch.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import collectives
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks


def _count(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of the whole collectives that move rows are added as they are called."""
    calls: list[str] = []
    for name in ("start_all_gather", "start_reduce_scatter"):
        function = getattr(collectives, name)
        patch.setattr(collectives, name, lambda *args, f=function, n=name, **by: calls.append(n) or f(*args, **by))
    return calls


@pytest.mark.parametrize(("name", "activation"), [("direct", "relu"), ("collective", "relu"), ("fused", None)])
@on_ranks(2)
def test_several_weights_share_one_gather(name: Implementation, activation: str | None) -> None:
    """Compare a call for three weights, one without a bias and one that is not trained, with a call for each."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = integers(1, world, 4, 2, 5)[rank]
    weights = [integers(2 + i, world, height, 5)[rank] for i, height in enumerate((3, 7, 2))]
    biases = [integers(6, world, 3)[rank], None, integers(7, world, 2)[rank]]
    grads = [integers(8 + i, world, 4 * world, 2, len(weight))[rank] for i, weight in enumerate(weights)]

    def leaves() -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        ws = [weight.clone().requires_grad_(i != 1) for i, weight in enumerate(weights)]
        return x.clone().requires_grad_(), ws, [b if b is None else b.clone().requires_grad_() for b in biases]

    with use(implementation=name), pytest.MonkeyPatch.context() as patch:
        x1, ws1, bs1 = leaves()
        apart = [all_gather_linear(x1, w, b, group, activation=activation) for w, b in zip(ws1, bs1, strict=True)]
        torch.autograd.backward(apart, grads)
        calls = _count(patch)
        x2, ws2, bs2 = leaves()
        together = all_gather_linear(x2, ws2, bs2, group, activation=activation)
        torch.autograd.backward(together, grads)
    if name == "collective":
        assert sorted(calls) == ["start_all_gather"] * 3 + ["start_reduce_scatter"], (
            "one of them compares the numbers of rows"
        )
    assert all(torch.equal(*pair) for pair in zip(together, apart, strict=True))
    assert torch.equal(x2.grad, x1.grad)
    for one, other in (*zip(ws2, ws1, strict=True), *zip(bs2, bs1, strict=True)):
        if one is not None:
            assert (one.grad is None) == (other.grad is None) == (one is ws2[1])
            assert one.grad is None or torch.equal(one.grad, other.grad)


def test_several_weights_on_one_rank() -> None:
    x, weight = normal(1, 4, 2, 6), normal(2, 8, 6)
    first, second = all_gather_linear(x, [weight, -weight], None, None, activation="relu")
    assert torch.equal(first, gemm(x, weight, activation="relu"))
    assert torch.equal(second, gemm(x, -weight, activation="relu"))


@pytest.mark.parametrize("name", ["direct", *exhaustive("collective", "fused")])
@on_ranks(3)
def test_ranks_without_rows_of_the_weight_take_part(name: Implementation) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = integers(1, world, 3, 4)[rank].requires_grad_()
    weight = integers(2, 0 if rank else 5, 4).requires_grad_()
    with use(implementation=name):
        out = all_gather_linear(x, weight, None, group)
        assert out.shape == (3 * world, 0 if rank else 5)
        out.sum().backward()
    assert torch.equal(x.grad, integers(2, 5, 4).sum(0).expand(3, 4)) and weight.grad.shape == weight.shape
