"""The tensor-parallel products of ranks on GPUs, each its own or all of them one; compiled, not interpreted.

What the ranks do here is also done by CPU ranks, so that this file is known to be right where there is no GPU.
"""

import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.implementation_choice import Implementation, implementation
from tpfuse.kernels import reference
from tpfuse.ops.all_gather_linear import all_gather_linear
from tpfuse.ops.fused_linear import FusedLinear
from tpfuse.ops.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.parallel_linear import parallel_linear
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import GpuRankPool, RankPool, pool

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    running = GpuRankPool(request.param)
    yield running
    running.close()


def _column(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None = None) -> Tensor:
    return torch.stack([reference.linear(x, w, b, activation) for w, b in zip(weight, bias, strict=True)])


def _row(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return reference.linear(torch.cat(list(x), -1), torch.cat(list(weight), -1), bias) + residual


def _pair(device: str, dtype: torch.dtype, rows: int, width: int, activation: str | None) -> None:
    """Both operators of a sequence-parallel block, and linear_all_reduce, with every gradient."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    own, height = slice(rank * rows, (rank + 1) * rows), 2 * width
    inputs = {
        "x": normal(1, world * rows, width, dtype=dtype),
        "weight": normal(2, world, height, width, dtype=dtype) / width**0.5,
        "bias": normal(3, world, height, dtype=dtype),
    }

    def column(**tensors: Tensor) -> Tensor:
        return _column(**tensors, activation=activation)

    shape = world, world * rows, height // 2 if activation in ("swiglu", "geglu") else height
    grad = normal(4, *shape, dtype=dtype)
    yardstick = Yardstick(column, inputs, grad)
    parts: dict[str, object] = {"x": own, "weight": rank, "bias": rank}
    leaves = {name: x[parts[name]].to(device).requires_grad_() for name, x in inputs.items()}  # type: ignore[index]
    out = all_gather_linear(*leaves.values(), group, activation=activation)
    out.backward(grad[rank].to(device))
    yardstick.check("out", out.cpu(), rank)
    for name, leaf in leaves.items():
        yardstick.check(name, leaf.grad.cpu(), parts[name])

    inputs = {
        "x": normal(5, world, world * rows, width, dtype=dtype),
        "weight": normal(6, world, height, width, dtype=dtype) / (world * width) ** 0.5,
        "bias": normal(7, height, dtype=dtype),
        "residual": normal(8, world * rows, height, dtype=dtype),
    }
    grad = normal(9, world * rows, height, dtype=dtype)
    yardstick = Yardstick(_row, inputs, grad)
    for scattered in (True, False):
        mine = own if scattered else slice(None)
        parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": mine}
        leaves = {name: x[parts[name]].to(device).requires_grad_() for name, x in inputs.items()}  # type: ignore[index]
        operator = linear_reduce_scatter if scattered else linear_all_reduce
        out = operator(leaves["x"], leaves["weight"], leaves["bias"], group, residual=leaves["residual"])
        out.backward(grad[mine].to(device))
        yardstick.check("out", out.cpu(), mine)
        for name, leaf in leaves.items():
            yardstick.check(name, leaf.grad.cpu(), parts[name])


def _all_pairs(device: str, names: tuple[Implementation, ...], small: bool) -> None:
    for name in names:
        with implementation(name):
            cases = [(torch.float32, 5, 24, "gelu")]
            if not small:
                cases += [(torch.bfloat16, 200, 64, activation) for activation in ("gelu_tanh", "swiglu", None)]
                cases += [
                    (torch.float16, 1, 128, "silu"),
                    (torch.bfloat16, 2100, 512, "geglu"),
                    (torch.float32, 63, 100, None),
                ]
            for case in cases:
                _pair(device, *case)


def _iterations(device: str, count: int, large: int) -> None:
    """Whole numbers over the same buffers, ranks late at random, shards loaded by programs and by copy engines."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    late = random.Random(rank)
    weight, down = integers(1, 48, 32).to(device), integers(2, 32, 48).to(device)
    with implementation("fused"):
        products = parallel_linear(weight, group)
        assert isinstance(products, FusedLinear)
        products._engine_bytes = 4 * 32 * large  # of `large` rows on
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
    """A captured pair, replayed: epochs go on counting."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    weight, down = integers(1, 48, 32).to(device), integers(2, 32, 48).to(device)
    x = torch.zeros(40, 32, device=device)
    with implementation("fused"), torch.no_grad():

        def pair() -> Tensor:
            out = all_gather_linear(x, weight, None, group)
            return linear_reduce_scatter(all_gather_linear(out[:40, :32], weight, None, group), down, None, group)

        pair()  # buffers are made before
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


@GPU
def test_against_reference(ranks: RankPool) -> None:
    ranks.run(_all_pairs, "cuda", ("fused", "collective"), False)


@GPU
def test_200_iterations(ranks: RankPool) -> None:
    ranks.run(_iterations, "cuda", 200, 100)


@GPU
def test_graphs(ranks: RankPool) -> None:
    ranks.run(_graph, "cuda")


def test_what_the_gpus_are_asked() -> None:
    pool(2).run(_all_pairs, "cpu", ("fused", "collective"), True)
    pool(2).run(_iterations, "cpu", 20, 4)
