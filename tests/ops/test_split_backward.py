"""A backward pass in two parts, as pipelines without bubbles run it, computes every product and every sum only once.

torch.distributed.pipelining first computes the gradient of a stage's input, and later those of its weights. Each test
compares both parts with one whole backward pass: the gradients to the bit, and what was computed and communicated.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import collectives
from tpfuse.comm.channel import Channel
from tpfuse.kernels import launch as launching
from tpfuse.ops.gemm import gemm
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.ops.linear import fused
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.ops.rms_norm import rms_norm
from tpfuse.parallel.pipeline.runner import backward_weights
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks

Function = Callable[..., Tensor]
Events = Counter[str]
AGAIN = Events({"activation gradient": 1})  # elementwise, and cheaper to compute twice than to keep


class _Computed(TorchDispatchMode):
    """Counts matrix products by their shapes, sums, products with a factor, and gradients of activations."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm"):
            left, right = (x for x in args if isinstance(x, Tensor)) if name == "mm" else args[-2:]
            self._events[f"product {tuple(left.shape)} {tuple(right.shape)}"] += 1
        elif name in ("threshold_backward", "activation_backward"):
            self._events["activation gradient"] += 1
        elif str(func) in ("aten.sum.dim_IntList", "aten.mul.out"):
            self._events[f"{func} {tuple(args[0].shape)}"] += 1
        return func(*args, **(kwargs or {}))


def _launches(events: Events, launch: Callable[..., None]) -> Callable[..., None]:
    """Return the launcher of norms, which counts the gradients that it computes."""

    def counted(kernel: Any, grid: Any, **arguments: Any) -> None:
        outputs = ("row_means_ptr", "dx_ptr", "dweight_parts_ptr", "dbias_parts_ptr", "dweight_ptr")
        reads_means = "dx_ptr" in arguments
        for name in outputs[1:] if reads_means else outputs:
            if arguments.get(name) is not None:
                events[name] += 1
        launch(kernel, grid, **arguments)

    return counted


@contextlib.contextmanager
def _recorded() -> Iterator[Events]:
    """Count what is computed and communicated in the block."""
    events: Events = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            events[name] += 1
            return function(*args, **options)

        return counted

    counted: dict[Any, list[str]] = {
        collectives: ["start_all_gather", "start_reduce_scatter", "all_reduce"],
        fused: ["all_gather_forward", "all_gather_gemm_forward", "gemm_reduce_scatter_forward"],
        Channel: ["signal"],
    }
    with contextlib.ExitStack() as stack:
        for owner, names in counted.items():
            for name in names:
                function = counting(name, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch.object(launching, "launch", _launches(events, launching.launch)))
        stack.enter_context(_Computed(events))
        yield events


def _compare(function: Function, x: Tensor, parameters: list[Tensor], twice: Events | None = None) -> None:
    """Compare both parts of a backward pass of function(x, *parameters) with a whole one.

    twice: what both parts compute or communicate, and a whole backward pass does once.
    """
    found, events = [], []
    for parts in (1, 2):
        leaf, *leaves = (tensor.clone().requires_grad_() for tensor in (x, *parameters))
        out = function(leaf, *leaves).clone()  # a stage's output must not be a view: torch detaches it in place
        grad = integers(9, *out.shape, dtype=out.dtype)
        if parts == 1:
            with _recorded() as whole:
                out.backward(grad)
            events.append(whole)
        else:
            edge = get_gradient_edge(out)
            with _recorded() as first:
                _, groups = stage_backward_input([out], [grad], [leaf], iter(leaves))
            assert leaf.grad is not None and all(parameter.grad is None for parameter in leaves)
            with _recorded() as second:
                backward_weights(leaves, groups)
            del edge
            events += [first, second]
        found.append([leaf.grad, *(parameter.grad for parameter in leaves)])
    assert all(map(torch.equal, *found))
    whole, first, second = events
    assert first and second and whole
    assert first + second == whole + (twice or Events()), f"whole {whole}, input {first}, weights {second}"


def _gathering(activation: str | None, several: bool) -> Function:
    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        group, half = dist.group.WORLD, len(parameters) // 2
        if several:
            outs = all_gather_linear(x, parameters[:half], parameters[half:], group, activation=activation)
            return torch.cat(outs, -1)
        return all_gather_linear(x, *parameters, group, activation=activation)

    return run


def _scattering(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = linear_reduce_scatter(x, weight, bias, dist.group.WORLD, residual=x[: len(x) // dist.get_world_size(), :, :3])
    return out.relu()


def _reducing(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_all_reduce(x, weight, bias, dist.group.WORLD, residual=x[..., :3])


def _gathers(name: Implementation) -> Events:
    """Return what gathers a gradient that dX and dW need: it is not kept between the parts, which would cost memory."""
    return Events({{"direct": "signal", "collective": "start_all_gather", "fused": "all_gather_forward"}[name]: 1})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("direct", torch.float64), ("fused", torch.float32), *exhaustive(("collective", torch.bfloat16))],
)
@on_ranks(2)
def test_tensor_parallel_products(name: Implementation, dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    x, rows = integers(rank, 4, 3, 5, dtype=dtype), integers(rank, 8, 3, 5, dtype=dtype)
    weight, bias = integers(2 + rank, 3, 5, dtype=dtype), integers(4, 3, dtype=dtype)
    other, wide = integers(5 + rank, 3, dtype=dtype), integers(7 + rank, 3, 5, dtype=dtype)
    signals = Events({"signal": 1} if name == "direct" else {})  # both parts communicate, in one epoch each
    with use(implementation=name):
        _compare(_gathering(None, False), x, [weight, bias], signals)
        _compare(_gathering("relu", False), x, [weight, bias], signals + AGAIN)
        _compare(_gathering(None, True), x, [weight, wide, bias, other], signals)
        _compare(_scattering, rows, [weight, bias], _gathers(name))
        _compare(_reducing, rows, [weight, bias])


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_gemm(chosen: Any) -> None:
    x, weight, bias = integers(1, 7, 5), integers(2, 3, 5), integers(3, 3)
    twice = AGAIN if chosen == "triton" else None  # torch's activation is an operator of its own
    with use(kernels=chosen):
        _compare(gemm, x, [weight, bias])
        _compare(lambda x, w, b: gemm(x, w, b, activation="relu"), x, [weight, bias], twice)


def test_a_weight_of_two_products_is_counted_once() -> None:
    """The gradient that the first product gets from the second one is part of what was kept of it."""
    again = Events({"product (7, 5) (5, 5)": 1})  # the second part walks from one product to the other
    with use(kernels="torch"):
        _compare(lambda x, w: gemm(gemm(x, w), w), integers(1, 7, 5), [integers(2, 5, 5)], again)


@pytest.mark.parametrize("columns", [40, *exhaustive(257)])
def test_norms(columns: int) -> None:
    """The kernels compute dx in one part, and the gradients of weight and bias in the other."""
    x, weight, bias = normal(1, 9, columns), normal(2, columns), normal(3, columns)
    with use(kernels="triton"):
        _compare(lambda x, w, b: layer_norm(x, w, b, 1e-5), x, [weight, bias])
        _compare(lambda x, w: rms_norm(x, w, 1e-5), x, [weight])


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_linear_cross_entropy(chosen: Any) -> None:
    """Forward computes the gradients; each part scales one of them."""
    target = torch.tensor([0, 3, -1, 2])
    with use(kernels=chosen):
        _compare(lambda x, w: linear_cross_entropy(x, w, target, 5)[0], normal(1, 4, 6), [normal(2, 5, 6)])


@on_ranks(2)
def test_linear_cross_entropy_of_two_ranks() -> None:
    group, target = dist.group.WORLD, torch.tensor([0, 3, -1, 9])
    x, weight = normal(1, 4, 6), normal(2 + dist.get_rank(), 5, 6)
    _compare(lambda x, w: linear_cross_entropy(x, w, target, 10, group)[0], x, [weight])
