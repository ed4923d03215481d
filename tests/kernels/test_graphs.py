"""Eager calls and replays of CUDA graphs in turn: every operator whose epochs replays advance, and planted faults.

The host's code of products with copy engines is that of GPUs: it has a stream of its own for the copies.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import COLLECTIVES
from tests.support.channels import connect
from tests.support.tiers import exhaustive
from tpfuse.explore import PCT, ExploreError, Sequential, SimulatedMemory, explore, explore_all
from tpfuse.explore.fresh_modules import fresh
from tpfuse.explore.suite import Fault, current, replace
from tpfuse.kernels import shard_sum
from tpfuse.ops.linear import engine_gather, engine_scatter, fused
from tpfuse.testing.inputs import integers

M, K, N = 2, 16, 8  # rows of a rank, columns of x, rows of the weight
MODULES = (engine_gather, engine_scatter, fused)
PRODUCT = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 1, "EPILOGUE_PARTS": 1}
TILES = {"all_gather_gemm": PRODUCT | {"COPIERS": 2, "BLOCK_COPY": 16}, "gemm_reduce_scatter": PRODUCT}

pytestmark = pytest.mark.usefixtures("tiny_tiles")
Operator = tuple[Callable[[], Tensor], Callable[[list[Tensor]], Tensor]]  # the call, and its result from all ranks' x


def collective(name: str, memory: SimulatedMemory, x: Tensor) -> Operator:
    one, end = COLLECTIVES[name], connect(memory)
    return partial(one.run, x, end), lambda xs: one.plain(xs, memory.rank)


def summed_shards(memory: SimulatedMemory, x: Tensor) -> Operator:
    """A sum over ranks, after which another launch frees the gradients."""
    end, other, rows = connect(memory), torch.zeros(1), slice(memory.rank * x.shape[1], (memory.rank + 1) * x.shape[1])
    gradients, squares = memory.buffer("gradients", (x.numel(),), x.dtype), torch.zeros(4).double()

    def call() -> Tensor:
        out = torch.empty(x.shape[1])
        gradients.local.copy_(x.flatten())
        shard_sum.shard_sum(gradients.local, gradients.addresses, out, squares, rows.start, end)
        COLLECTIVES["one_shot"].run(other[None], end)
        return out

    return call, lambda xs: torch.stack(xs).sum(0)[memory.rank]


def product(engines: bool, scatter: bool, memory: SimulatedMemory, x: Tensor) -> Operator:
    module = current(fused)
    linear, stream, weight = module.FusedLinear(memory), torch.cuda.Stream(), integers(7, N, K)
    linear._copies = lambda: module._Copies(stream, memory.device)
    linear = linear.variant(engines=engines, other_tiles=False)
    if scatter:
        call = partial(linear.reduce_scatter, x, weight, None, None)
        return call, lambda xs: (torch.stack(xs).sum(0) @ weight.t()).chunk(memory.world)[memory.rank]
    return lambda: linear.all_gather(x, [weight], [None], None, False)[0][0], lambda xs: torch.cat(xs) @ weight.t()


OPERATORS: dict[str, tuple[Callable[..., Operator], tuple[int, ...]]] = {
    **{name: (partial(collective, name), (2, 20)) for name in COLLECTIVES},
    "shard_sum": (summed_shards, (2, 20)),
    "all_gather_gemm": (partial(product, False, False), (M, K)),
    "gemm_reduce_scatter": (partial(product, False, True), (2 * M, K)),
    "all_gather_gemm, engines": (partial(product, True, False), (M, K)),
    "gemm_reduce_scatter, engines": (partial(product, True, True), (2 * M, K)),
}


def alternating(operator: str, memory: SimulatedMemory) -> None:
    """Call twice, capture, replay, call, and replay. x is symmetric memory, so that its accesses are checked."""
    make, shape = OPERATORS[operator]
    x = memory.buffer("x", shape, torch.float32).local
    call, expected = make(memory, x)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0)
    for epoch, way in enumerate(("call", "call", "capture", "replay", "call", "replay")):
        xs = [integers(10 * epoch + rank, *shape) for rank in range(memory.world)]
        if way == "capture":
            with torch.cuda.graph(graph):
                captured = call()
            continue
        x.copy_(xs[memory.rank])
        if way == "call":
            out = call()
        else:
            graph.replay()
            out = captured
        assert torch.equal(out, expected(xs)), f"{way}, epoch {epoch}"


FIRST = "all_gather_gemm, engines"  # it has a stream, signals of the host and launches


def test_no_alarm() -> None:
    explore(partial(alternating, FIRST), 2, schedules=[PCT(0)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_alarm_in_any_execution(operator: str) -> None:
    report = explore_all(partial(alternating, operator), 2, seconds=600)
    print(f"{operator}: {report}")
    assert report.exhausted


SEND = engine_gather.EngineGather.send
COUNT = "vars(self).__setitem__('sent', vars(self).get('sent', 0) + 1) or self.sent"
BEGIN, JOIN = fused._Copies.__init__, fused._Copies.join
FAULTS = {  # what is planted -> how, and the message
    "an epoch of the host": (
        replace(SEND, "self._stamp", by=COUNT, call="signal"),
        r"deadlock: [^$]*rank 0, program 0 waits at kernels/signals.py",
    ),
    "an epoch that the host reads": (
        replace(SEND, "self._stamp", by="int(self._stamp)", call="signal"),
        "_local_scalar_dense.default: the host cannot wait while a graph is captured",
    ),
    "copies do not wait": (
        replace(BEGIN, "stream.wait_stream(torch.cuda.current_stream(device))", by="pass"),
        r"race on x\[[^$]*write by .*: x.copy_[^$]*read on stream 1 by rank \d at .*engine_gather.*destinations",
    ),
    "copies are not waited for": (
        replace(JOIN, "torch.cuda.current_stream(self._device).wait_stream(self._stream)", by="pass"),
        r"race on x\[[^$]*read on stream 1 by rank \d at .*engine_gather[^$]*write by rank \d at .*: x.copy_",
    ),
}


@pytest.mark.parametrize("name", [*exhaustive("an epoch of the host"), *list(FAULTS)[1:]])
def test_faults_of_the_host_are_found(name: str) -> None:
    change, message = FAULTS[name]
    mutant = Fault(name, change).mutant()
    with fresh(MODULES, {mutant.module: mutant.source}), pytest.raises(ExploreError, match=message):
        explore(partial(alternating, FIRST), 2, schedules=[Sequential()])
