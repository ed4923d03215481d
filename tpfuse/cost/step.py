"""The time of a training step, by kind.

The host issues operators while the device runs those before. Of a pass that takes `host` seconds of the one and
`device` seconds of the other, communication included, some operators wait for the host and others for the device. The
pass takes the root of host^2 + device^2, which is the larger of both where they are far apart.
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from math import hypot
from typing import NamedTuple

from tpfuse.choices import Recompute
from tpfuse.cost import collectives, overlap, work
from tpfuse.cost.bubble import Stages, StageTimes, action_seconds, cut, step_length
from tpfuse.cost.hardware import Cluster, Gpu
from tpfuse.cost.layout import Layout
from tpfuse.cost.products import product_seconds
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.work import HALF, Work
from tpfuse.parallel.pipeline.order import order
from tpfuse.parallel.pipeline.timeline import Timeline, timeline

# Operators of ring attention on CPU ranks for each rank, forward and backward: 27 calls of torch more for each further
# rank in a block of which a rank alone makes 62, which count as 32 operators (torch's dispatcher, 4 x 128 features).
_RING = (5, 9)


@dataclass(frozen=True)
class Times:
    """The seconds of a step on the rank that ends last, by kind. They add up to the time of the step.

    products: of matrices. attention: attention's kernels. elementwise: operators that the memory's bandwidth bounds.
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


class Pass(NamedTuple):
    """The seconds of passes, by kind."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    launches: float = 0.0

    def plus(self, other: "Pass", times: float = 1.0) -> "Pass":
        """Return the sum of this and `times` the other."""
        return Pass(*(a + times * b for a, b in zip(self, other, strict=True)))


class _Parts(NamedTuple):
    """The forward and backward passes of the parts of a model. extra: of a stage, for the program's bookkeeping."""

    block: tuple[Pass, Pass]
    embedding: tuple[Pass, Pass]
    head: tuple[Pass, Pass]
    extra: Pass


def step_times(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> Times:
    """Return the times of a step. It is fast: `tpfuse plan` calls it for tens of thousands of layouts."""
    program = _on(cluster, program)
    parts, stages = _parts_of(sizes, layout, cluster, program)
    last = _rank_pass(parts, stages, layout)
    busy = layout.micro_batches * sum(last)
    length = busy
    waits = 0.0
    if layout.pp > 1:
        times = _stage_times(parts, stages)
        length = step_length(layout.schedule, layout.pp, layout.stages_per_rank, layout.micro_batches, times)
        crossings = layout.pp * layout.stages_per_rank - 1
        waits = 2 * crossings * _message(sizes, layout, cluster, program) + _tied(sizes, layout, cluster, program)
    data, optimizer = _update(sizes, layout, cluster, program, stages, parts)
    count = layout.micro_batches
    found = Times(
        count * last.products,
        count * last.attention,
        count * last.elementwise,
        count * last.tensor,
        count * last.context,
        waits,
        data,
        max(0.0, length - busy),
        optimizer,
        count * last.launches + program.step_operators * cluster.gpu.host_seconds,
    )
    if not cluster.gpu.is_host:
        return found
    mean = sum(_mean_pass(parts, sizes, layout)) - sum(last)
    return _taking_turns(found, count * mean, min(layout.ranks, cluster.per_node), cluster.gpu)


def played_step(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> Timeline:
    """Return the passes of a step of a pipeline, in seconds, as the schedule orders them.

    The first stage, the stages in the middle and the last one differ in time, as they do for `step_times`. A rank waits
    for each message from another rank.
    """
    program = _on(cluster, program)
    times = _stage_times(*_parts_of(sizes, layout, cluster, program))
    played = order(layout.schedule, layout.pp, layout.stages_per_rank, layout.micro_batches)
    return timeline(played, action_seconds(times, played.stages), _message(sizes, layout, cluster, program))


def _on(cluster: Cluster, program: Program) -> Program:
    """Return the program as it runs on the cluster.

    CPU ranks copy by themselves, so nothing overlaps, and multiply in place what each rank has (`tpfuse.ops.linear`).
    """
    return _on_host(program) if cluster.gpu.is_host else program


@cache
def _on_host(program: Program) -> Program:
    return replace(program, overlap_tp=False, overlap_dp=False, chunked_products=True)


def _parts_of(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> tuple[_Parts, Stages]:
    """Return the passes of the parts of the model for a micro-batch, and the cut into stages."""
    parts = _parts(_without_layers(sizes), layout.tp, layout.cp, layout.micro_batch, layout.recompute, cluster, program)
    return parts, cut(sizes, layout.pp * layout.stages_per_rank, program.equal_stages)


def _stage_times(parts: _Parts, stages: Stages) -> StageTimes:
    """Return the seconds of the passes of the first stage, of each in the middle, and of the last."""
    forward, backward, extra = sum(parts.block[0]), sum(parts.block[1]), sum(parts.extra) / 2
    front, head = [sum(each) for each in parts.embedding], [sum(each) for each in parts.head]
    middle = stages.middle * forward + extra, stages.middle * backward + extra
    last = stages.last * forward + extra + head[0], stages.last * backward + extra + head[1]
    return (middle[0] + front[0], middle[1] + front[1]), middle, last


def _taking_turns(times: Times, more: float, ranks: int, gpu: Gpu) -> Times:
    """Return the times of CPU ranks, which share cores. more: the seconds by which the mean rank computes longer.

    While a rank waits for others in the pipeline, these compute. So a step takes at least the work of all ranks.
    """
    if ranks <= gpu.at_once:
        return times
    alone = times.total - times.bubble
    length = max(times.total, (alone + more) * ranks / gpu.at_once)
    slower = min(ranks / gpu.at_once, length / alone)
    busy = {kind.name: getattr(times, kind.name) * slower for kind in fields(times) if kind.name != "bubble"}
    return Times(**busy, bubble=max(0.0, length - sum(busy.values())))


def _rank_pass(parts: _Parts, stages: Stages, layout: Layout) -> Pass:
    """Return the passes of one micro-batch on the rank of the last stage."""
    blocks = stages.last + (layout.stages_per_rank - 1) * stages.middle
    total = Pass().plus(parts.extra, layout.stages_per_rank).plus(parts.block[0], blocks).plus(parts.block[1], blocks)
    total = total.plus(parts.head[0]).plus(parts.head[1])
    if layout.pp == 1:
        total = total.plus(parts.embedding[0]).plus(parts.embedding[1])
    return total


def _mean_pass(parts: _Parts, sizes: ModelSizes, layout: Layout) -> Pass:
    """Return the passes of one micro-batch on the mean pipeline rank."""
    total = Pass().plus(parts.extra, layout.stages_per_rank)
    for each, times in ((parts.block, sizes.layers), (parts.head, 1), (parts.embedding, 1)):
        total = total.plus(each[0], times / layout.pp).plus(each[1], times / layout.pp)
    return total


def _message(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> float:
    link = cluster.link(2, layout.tp * layout.cp * layout.dp)
    elements = layout.micro_batch * sizes.tokens // layout.cp * sizes.width
    return collectives.send(float(program.parameter_bytes * elements), link)


def _tied(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> float:
    """Return the seconds in which the first and the last stage add up the gradients of the table that they share."""
    link = cluster.link(layout.pp, layout.tp * layout.cp * layout.dp)
    size = sizes.table_parameters / layout.tp * program.gradient_bytes
    return collectives.all_reduce(size, 2, link) if sizes.tied else 0.0


@cache
def _without_layers(sizes: ModelSizes) -> ModelSizes:
    """Return the sizes on which the parts depend, which models of different depth share."""
    return replace(sizes, name="", layers=0)


@cache
def _parts(
    sizes: ModelSizes, tp: int, cp: int, micro_batch: int, recompute: Recompute, cluster: Cluster, program: Program
) -> _Parts:
    """Return the passes of the parts of a model for one micro-batch."""
    gpu, rows = cluster.gpu, micro_batch * sizes.tokens // cp
    first, second = work.block(sizes, tp, cp, micro_batch, program)
    again = work.recomputed(sizes, tp, cp, micro_batch, program, recompute)
    works = ((first,), (second,) if again is None else (second, again))
    device = [_device(gpu, program, *each) for each in works]
    tensor = [_tensor(sizes, rows, tp, cluster, program, each.products, again=each is device[1]) for each in device]
    context = _context(sizes, rows, tp, cp, cluster, program, device[0].attention)
    count = 0 if tp == 1 else (2 if not program.sequence_parallel else 4)
    more = count * program.collective_operators
    ring = (_RING[0] * cp, _RING[1] * cp) if gpu.is_host and cp > 1 else (0, 0)
    twice = 2 if recompute == "full" else 1
    block = (
        _passed(gpu, device[0]._replace(tensor=tensor[0], context=context), works[0], more + ring[0]),
        _passed(
            gpu,
            device[1]._replace(
                tensor=tensor[1] + (tensor[0] if recompute == "full" else 0.0),
                context=context * (2 if recompute == "none" else 3),
            ),
            works[1],
            twice * more + ring[1] + (twice - 1) * ring[0],
        ),
    )
    edge = collectives.all_reduce(float(program.parameter_bytes * rows * sizes.width), tp, cluster.link(tp, 1))
    ends = work.embedding(sizes, rows), work.head(sizes, tp, rows, program)
    embedding, head = (
        tuple(
            _passed(gpu, _device(gpu, program, each)._replace(tensor=edge if communicates else 0.0), (each,), 0.0)
            for each, communicates in zip(both, sides, strict=True)
        )
        for both, sides in zip(ends, ((True, False), (False, True)), strict=True)
    )
    return _Parts(
        block,
        (embedding[0], embedding[1]),
        (head[0], head[1]),
        Pass(launches=2 * program.pass_operators * gpu.host_seconds),
    )


def _device(gpu: Gpu, program: Program, *works: Work) -> Pass:
    """Return the seconds of the device for works that it computes in one go."""
    size, slower = program.parameter_bytes, gpu.bandwidth * gpu.elementwise_share
    added = sum(each.added for each in works) / gpu.bandwidth
    return Pass(
        products=sum(product_seconds(product, gpu, size) for each in works for product in each.products),
        attention=sum(each.attention for each in works) / (gpu.rate(size) * gpu.attention_share),
        elementwise=sum(each.elementwise for each in works) * size / HALF / slower + added,
    )


def _passed(gpu: Gpu, device: Pass, works: tuple[Work, ...], collective: float) -> Pass:
    """Return the seconds of works on the device and the host. collective: the operators of communication."""
    operators = sum(each.operators for each in works) + collective
    host, seconds = operators * gpu.host_seconds, sum(device)
    if gpu.is_host:
        return device._replace(launches=host)
    return device._replace(launches=hypot(host, seconds + operators * gpu.launch_seconds) - seconds)


def _tensor(
    sizes: ModelSizes, rows: int, tp: int, cluster: Cluster, program: Program, products: float, again: bool
) -> float:
    """Return the communication of tensor-parallel ranks in one pass of a block, which no product hides.

    again: whether the inputs of the two products that gather are gathered once more, for the gradients of the weights:
    ranks that share the tokens keep only their own (arXiv:2205.05198, section 4.2.2).
    """
    if tp == 1:
        return 0.0
    size, link = float(program.parameter_bytes * rows * sizes.width), cluster.link(tp, 1)
    if not program.sequence_parallel:
        return 2 * collectives.all_reduce(size, tp, link)
    gathers = 4 if again else 2
    alone = gathers * collectives.all_gather(size, tp, link) + 2 * collectives.reduce_scatter(size, tp, link)
    if not program.overlap_tp:
        return alone
    message = collectives.send(size / tp, link)
    each = products / 4  # a block has four products; two of them gather and two scatter
    exposed = 2 * (overlap.gather_exposed(each, message, tp) + overlap.scatter_exposed(each, message, tp))
    return alone - program.hidden_share * max(0.0, alone - exposed)


def _context(
    sizes: ModelSizes, rows: int, tp: int, cp: int, cluster: Cluster, program: Program, attention: float
) -> float:
    """Return the communication of ring attention in the forward pass of a block, which attention does not hide."""
    if cp == 1:
        return 0.0
    keys = 2.0 * program.parameter_bytes * rows * -(-sizes.kv_heads // tp) * sizes.head_size
    if cluster.gpu.is_host:
        return (cp - 1) * collectives.send(keys, cluster.link(cp, tp))
    return overlap.ring_exposed(attention, collectives.send(keys, cluster.link(cp, tp)), cp)


def _update(
    sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program, stages: Stages, parts: _Parts
) -> tuple[float, float]:
    """Return the seconds of data-parallel communication that nothing hides, and those of the optimizer."""
    blocks = stages.last + (layout.stages_per_rank - 1) * stages.middle
    one = sizes.block_parameters / layout.tp
    parameters = blocks * one + sizes.table_parameters / layout.tp
    ranks, stride = layout.dp * layout.cp, layout.tp
    shards = ranks if layout.zero else 1
    # Adam reads and writes its state, and reads and writes the gradient twice: for its norm and to clear it.
    moved = 2 * program.state_bytes + 4 * program.gradient_bytes + program.parameter_bytes
    optimizer = parameters / shards * moved / cluster.gpu.bandwidth
    if ranks == 1:
        return 0.0, optimizer
    forward, backward = blocks * sum(parts.block[0]), blocks * sum(parts.block[1])
    gradients, last = parameters * program.gradient_bytes, one * program.gradient_bytes
    if layout.zero == 0:
        whole = collectives.grouped_all_reduce(gradients, ranks, stride, cluster)
        end = collectives.grouped_all_reduce(last, ranks, stride, cluster)
    else:
        whole = collectives.grouped_all_gather(gradients, ranks, stride, cluster)
        end = collectives.grouped_all_gather(last, ranks, stride, cluster)
    # Micro-batches are accumulated, and only the last one communicates.
    data = overlap.hidden_rest(whole, backward, end) if program.overlap_dp else whole
    if layout.zero:
        gather = collectives.grouped_all_gather(parameters * program.parameter_bytes, ranks, stride, cluster)
        start = collectives.grouped_all_gather(one * program.parameter_bytes, ranks, stride, cluster)
        # Stage 3 gathers for each pass of a micro-batch; in a pipeline once in a step (`tpfuse.zero.fully_sharded`).
        passes = (0.0,) if layout.zero < 3 else (forward, backward) if layout.pp == 1 else (forward,)
        count = layout.micro_batches if layout.zero == 3 and layout.pp == 1 else 1
        hides = program.overlap_dp and layout.zero == 3
        data += count * sum(overlap.hidden_rest(gather, seconds, start) if hides else gather for seconds in passes)
    return data, optimizer
