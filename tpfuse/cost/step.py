"""The time of a training step, by kind."""

from dataclasses import dataclass, fields
from functools import cache

from tpfuse.cost import collectives, work
from tpfuse.cost.hardware import Cluster, Gpu, Link
from tpfuse.cost.layout import Layout
from tpfuse.cost.products import product_seconds
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes


@dataclass(frozen=True)
class Times:
    """The seconds of a step on the rank that ends last, by kind. They add up to the time of the step.

    products: matrix products. attention: attention's kernels. elementwise: operators that the memory's bandwidth bounds.
    tensor, context, pipeline, data: communication of each dimension that nothing hides. bubble: waiting for other
    pipeline ranks. optimizer: its update. launches: what kernels and their host need beyond the times above.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    launches: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class _Pass:
    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    launches: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elementwise + self.tensor + self.context + self.launches


def _sum(*passes: tuple[float, _Pass]) -> _Pass:
    return _Pass(*(sum(n * getattr(each, kind.name) for n, each in passes) for kind in fields(_Pass)))


def step_times(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> Times:
    """Return the times of a step. It must be fast: `tpfuse plan` calls it for tens of thousands of layouts."""
    gpu = cluster.gpu
    stages = layout.pp * layout.stages_per_rank
    forward, backward = _block_passes(sizes, layout, cluster, program)
    tail = _plain(work.head(sizes, layout).forward, gpu), _plain(work.head(sizes, layout).backward, gpu)
    front = _plain(work.embedding(sizes, layout).forward, gpu), _plain(work.embedding(sizes, layout).backward, gpu)
    layers = sizes.layers / stages
    extra = _Pass(0, 0, 0, 0, 0, 2 * program.pass_operators * gpu.host_seconds)
    middle = _sum((layers, forward), (layers, backward), (1, extra))
    last = _sum((1, middle), (1, tail[0]), (1, tail[1]))
    if stages == 1:
        last = _sum((1, last), (1, front[0]), (1, front[1]))
    turns = layout.stages_per_rank
    rank = _sum((1, last), (turns - 1, middle))  # the rank of the last stage computes the longest
    busy = _sum((layout.micro_batches, rank))
    link = cluster.link(2, layout.tp * layout.cp * layout.dp)
    size = 2.0 * work.rank_tokens(sizes, layout) * sizes.width
    message = collectives.send(size, link) if layout.pp > 1 else 0.0
    split = layout.schedule in ("zero_bubble", "zbv")
    bubble = (layout.pp - 1) * middle.seconds * (1 / 3 if split else 1)
    parameters = (layers * turns * sizes.block_parameters + sizes.table_parameters) / layout.tp
    return Times(
        busy.products,
        busy.attention,
        busy.elementwise,
        busy.tensor,
        busy.context,
        2 * (layout.pp - 1) * message,
        _data(parameters, layout, cluster, program),
        bubble,
        parameters * 2.0 * (program.state_bytes + program.gradient_bytes) / gpu.bandwidth / _shards(layout),
        busy.launches + program.step_operators * gpu.host_seconds,
    )


def _shards(layout: Layout) -> int:
    return layout.dp * layout.cp if layout.zero else 1


def _data(parameters: float, layout: Layout, cluster: Cluster, program: Program) -> float:
    ranks = layout.dp * layout.cp
    link = cluster.link(ranks, layout.tp)
    if layout.zero == 0:
        return collectives.all_reduce(parameters * program.gradient_bytes, ranks, link)
    gather = collectives.all_gather(parameters * program.parameter_bytes, ranks, link)
    scatter = collectives.all_gather(parameters * program.gradient_bytes, ranks, link)
    return scatter * (layout.micro_batches if layout.zero > 1 else 1) + gather * (
        2 * layout.micro_batches if layout.zero > 2 else 1
    )


@cache
def _plain(each: work.Work, gpu: Gpu) -> _Pass:
    products = sum(product_seconds(product, gpu) for product in each.products)
    attention = each.attention_flops / (gpu.half_rate * gpu.attention_share)
    elementwise = each.elementwise_bytes / gpu.bandwidth
    device = products + attention + elementwise
    return _Pass(products, attention, elementwise, 0, 0, max(0.0, each.operators * gpu.host_seconds - device))


def _block_passes(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> tuple[_Pass, _Pass]:
    passes, gpu = work.block(sizes, layout, program), cluster.gpu
    tensor = 2 * collectives.all_reduce(
        2.0 * work.rank_tokens(sizes, layout) * sizes.width, layout.tp, cluster.link(layout.tp, 1)
    )
    forward = _with(_plain(passes.forward, gpu), tensor, passes.forward.operators * gpu.host_seconds)
    backward = _with(_plain(passes.backward, gpu), tensor, passes.backward.operators * gpu.host_seconds)
    if layout.recompute == "full":
        backward = _sum((1, backward), (1, forward))
    return forward, backward


def _with(each: _Pass, tensor: float, host: float) -> _Pass:
    device = each.products + each.attention + each.elementwise + tensor
    return _Pass(each.products, each.attention, each.elementwise, tensor, 0, max(0.0, host - device))
