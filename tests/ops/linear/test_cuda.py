"""Tensor-parallel products of ranks on GPUs, one for each rank or one for all, with compiled kernels.

CPU ranks run the same functions, so that this file is tested without a GPU too.
"""

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.linear.parallel_products import PRODUCTS, Case
from tests.support.cases import naming
from tpfuse.choices import Implementation
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.dispatch import parallel_linear
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.switches import use
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import GpuRankPool, RankPool, pool

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    running = GpuRankPool(request.param)
    yield running
    running.close()


def _all_products(device: str, names: tuple[Implementation, ...], small: bool) -> None:
    cases = [Case(torch.float32, (5,), k=24, n=48, activation="gelu")]
    if not small:
        cases += [Case(torch.bfloat16, (200,), k=64, n=128, activation=name) for name in ("gelu_tanh", "swiglu", None)]
        cases += [
            Case(torch.float16, (1,), k=128, n=256, activation="silu"),
            Case(torch.bfloat16, (2100,), k=512, n=1024, activation="geglu"),
            Case(torch.float32, (63,), k=100, n=200),
        ]
    for name, product, case in itertools.product(names, PRODUCTS.values(), cases):
        activation = None if "residual" in product.held else case.activation
        with use(implementation=name), naming((name, product.function.__name__, case)):
            product.check(replace(case, activation=activation, device=device), dist.group.WORLD)


def _iterations(device: str, count: int, large: int) -> None:
    """Multiply integers repeatedly in the same buffers, with random delays, gathered by programs and copy engines."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    late = random.Random(rank)
    weight, down = integers(1, 48, 32).to(device), integers(2, 32, 48).to(device)
    with use(implementation="fused"):
        products = parallel_linear(weight, group)
        assert isinstance(products, FusedLinear)
        products._engine_bytes = 4 * 32 * large  # shards of `large` rows or more
        for step in range(count):
            if late.random() < 0.1:
                time.sleep(late.random() * 2e-3)
            rows = 1 + step * 37 % (2 * large)
            whole = integers(step, world, rows, 32).to(device)
            out = all_gather_linear(whole[rank], weight, None, group)
            assert torch.equal(out, whole.flatten(0, 1) @ weight.t())
            back = linear_reduce_scatter(out, down, None, group)
            assert torch.equal(back, world * (whole[rank] @ weight.t() @ down.t()))


def _graph(device: str) -> None:
    """Capture a pair of products in a graph and replay it: epochs continue to count."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    weight, down = integers(1, 48, 32).to(device), integers(2, 32, 48).to(device)
    x = torch.zeros(40, 32, device=device)
    with use(implementation="fused"), torch.no_grad():

        def pair() -> Tensor:
            out = all_gather_linear(x, weight, None, group)
            return linear_reduce_scatter(all_gather_linear(out[:40, :32], weight, None, group), down, None, group)

        pair()  # buffers are allocated before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = pair()
        for step in range(5):
            whole = integers(step, world, 40, 32).to(device)
            x.copy_(whole[rank])
            dist.barrier()
            graph.replay()
            torch.cuda.synchronize()
            gathered = whole.flatten(0, 1) @ weight.t()
            expected = world * (gathered[:40, :32] @ weight.t() @ down.t())
            assert torch.equal(out, expected), f"replay {step}"


@pytest.mark.gpu
@GPU
def test_products_match_the_reference(ranks: RankPool) -> None:
    ranks.run(_all_products, "cuda", ("fused", "collective"), False)


@pytest.mark.gpu
@GPU
def test_200_iterations_are_exact(ranks: RankPool) -> None:
    ranks.run(_iterations, "cuda", 200, 100)


@pytest.mark.gpu
@GPU
def test_products_run_in_cuda_graphs(ranks: RankPool) -> None:
    ranks.run(_graph, "cuda")


@pytest.mark.exhaustive
def test_cpu_ranks_pass_the_same_checks() -> None:
    pool(2).run(_all_products, "cpu", ("fused", "collective"), True)
    pool(2).run(_iterations, "cpu", 20, 4)
