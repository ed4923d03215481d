"""Operators without a second derivative, and without a derivative in forward mode, raise an error.

The second derivative is that of a gradient penalty after a sum or a loss.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.ops import collectives
from tpfuse.ops.attention import attention
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.ops.dropout import dropout
from tpfuse.ops.gemm import gemm
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks

Group = dist.ProcessGroup
WEIGHT, TARGET = torch.ones(4, 6), torch.tensor([0, 3, 1, 2])


def _embedding_loss(x: Tensor, group: Group) -> Tensor:
    return VocabParallelEmbedding(8, 6, device_mesh=tensor_mesh()).loss(x, TARGET, 1.0)


def _attention(schedule: str) -> Callable[[Tensor, Group], Tensor]:
    def run(x: Tensor, group: Group) -> Tensor:
        q = x.view(1, 2, 2, 6)
        return ring_attention(q, q, q, group=group, schedule=schedule)

    return run


OPERATORS: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "all_gather_linear": lambda x, group: all_gather_linear(x, WEIGHT, None, group),
    "linear_reduce_scatter": lambda x, group: linear_reduce_scatter(x, WEIGHT, None, group),
    "linear_all_reduce": lambda x, group: linear_all_reduce(x, WEIGHT, None, group),
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
    "cross_entropy": lambda x, group: cross_entropy(x, TARGET, 12, group),
    "linear_cross_entropy": lambda x, group: linear_cross_entropy(x, WEIGHT, TARGET, 8, group)[0],
    "linear_cross_entropy alone": lambda x, group: linear_cross_entropy(x, WEIGHT, TARGET, 4)[0],
    "embedding loss": _embedding_loss,
    "ring": _attention("ring"),
    "ulysses": _attention("ulysses"),
}


@on_ranks(2)
def test_a_gradient_penalty_is_an_error() -> None:
    group = dist.group.WORLD
    assert group is not None
    for operator in OPERATORS.values():
        for reduced in (Tensor.sum, lambda out: out.square().sum()):
            x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_()
            (grad,) = torch.autograd.grad(reduced(operator(x, group)), x, create_graph=True)
            with pytest.raises(RuntimeError, match="has no second derivative"):
                (reduced(operator(x, group)) + grad.square().sum()).backward()


def _refuses_tangents(operator: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that both ways to forward mode raise an error, instead of a derivative of 0."""
    with pytest.raises(RuntimeError):
        torch.func.jvp(operator, (x,), (torch.ones_like(x),))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level(), pytest.raises(RuntimeError):
            operator(forward_ad.make_dual(x, torch.ones_like(x)))


@on_ranks(2)
def test_a_derivative_in_forward_mode_is_an_error() -> None:
    group = dist.group.WORLD
    assert group is not None
    for name in ("direct", "collective"):
        with use(implementation=name):
            for title, operator in OPERATORS.items():
                with naming((name, title)):
                    _refuses_tangents(partial(operator, group=group), torch.linspace(0, 1, 24).view(4, 6))


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gemm": lambda x, weight: gemm(x, weight, activation="gelu"),
    "layer_norm": lambda x, weight: layer_norm(x, weight[0], None, 1e-5),
    "attention": lambda x, weight: attention(*[x.view(1, 1, 8, 16)] * 3, causal=True),
    "cross_entropy": lambda x, weight: cross_entropy(x, torch.arange(8), 16, None),
}


@pytest.mark.parametrize("reduced", [Tensor.sum, lambda out: out.square().sum()])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_without_a_second_derivative_says_so(name: str, reduced: Callable[[Tensor], Tensor]) -> None:
    x, weight = normal(1, 8, 16).requires_grad_(), normal(2, 16, 16).requires_grad_()
    with use(kernels="triton"):
        (grad,) = torch.autograd.grad(reduced(KERNELS[name](x, weight)), x, create_graph=True)
        grad.mul_(1.0)  # as clipping does
        with pytest.raises(RuntimeError, match="has no second derivative"):
            grad.square().sum().backward()


@pytest.mark.parametrize("name", [*KERNELS, "dropout"])
def test_a_kernel_without_a_derivative_in_forward_mode_says_so(name: str) -> None:
    dropped: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "dropout": lambda x, weight: dropout(x, 0.5, torch.arange(8), torch.tensor(5))
    }
    with use(kernels="triton"):
        _refuses_tangents(partial((KERNELS | dropped)[name], weight=normal(2, 16, 16)), normal(1, 8, 16))
