"""The time of a training step, by kind.

The host issues operators while the device runs those before. Of a pass that takes `host` seconds of the one and
`device` seconds of the other, communication included, some operators wait for the host and others for the device. The
pass takes the root of host^2 + device^2, which is the larger of both where they are far apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, hypot, inf
from typing import NamedTuple

from tpfuse.cost import collectives, overlap, work
from tpfuse.cost.bubble import Cut, Stage, StageKind, cut_of, pass_seconds, step_length, usual_cut
from tpfuse.cost.hardware import Cluster, Gpu
from tpfuse.cost.layout import Layout, Share
from tpfuse.cost.products import product_seconds
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.work import HALF, Work
from tpfuse.parallel.pipeline.order import order, stage_ranks
from tpfuse.parallel.pipeline.timeline import Timeline, timeline

# On CPU ranks, ring attention issues so many operators for each rank, forward and backward: a block makes 27 calls of
# torch more for each further rank, beside the 62 of a rank alone, which count as 32 operators (torch's dispatcher, 4 x
# 128 features).
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


def step_times(
    sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program, blocks: Sequence[int] = ()
) -> Times:
    """Return the times of a step. It is fast: `tpfuse plan` calls it for tens of thousands of layouts.

    blocks: the number of blocks of each stage of a pipeline; () for the cut of `tpfuse train`.
    """
    program = _on(cluster, program)
    parts, cut = _parts_of(sizes, layout, cluster, program), _cut(sizes, layout, program, blocks)
    last = _rank_pass(parts, cut)
    busy = layout.micro_batches * sum(last)
    length = busy
    waits = 0.0
    if layout.pp > 1:
        times = [_stage(parts, kind) for kind in cut.kinds]
        pipeline = layout.schedule, layout.pp, layout.stages_per_rank, layout.micro_batches
        length = step_length(*pipeline, cut, times, _cores(layout, cluster))
        crossings = layout.pp * layout.stages_per_rank - 1
        waits = 2 * crossings * _message(sizes, layout, cluster, program) + _tied(sizes, layout, cluster, program)
    data, optimizer = _update(sizes, layout, cluster, program, cut, parts)
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
    return _taking_turns(found, busy, layout, cut, cluster, program) if cluster.gpu.is_host else found


def played_step(
    sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program, blocks: Sequence[int] = ()
) -> Timeline:
    """Return the passes of a step of a pipeline, in seconds, as the schedule orders them.

    blocks: as for `step_times`. A rank waits for each message from another rank.
    """
    program = _on(cluster, program)
    parts, cut = _parts_of(sizes, layout, cluster, program), _cut(sizes, layout, program, blocks)
    times = [_stage(parts, kind) for kind in cut.kinds]
    return timeline(
        order(layout.schedule, layout.pp, layout.stages_per_rank, layout.micro_batches),
        lambda action: pass_seconds(times[cut.of_stages[action.stage]], action.kind),
        _message(sizes, layout, cluster, program),
    )


def _on(cluster: Cluster, program: Program) -> Program:
    """Return the program as it runs on the cluster.

    CPU ranks copy by themselves, so nothing overlaps, and multiply in place what each rank has (`tpfuse.ops.linear`).
    """
    return _on_host(program) if cluster.gpu.is_host else program


@cache
def _on_host(program: Program) -> Program:
    return replace(program, overlap_tp=False, overlap_dp=False, chunked_products=True)


def _parts_of(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> _Parts:
    """Return the passes of the parts of the model for a micro-batch."""
    return _parts(_without_layers(sizes), layout.share, cluster, program)


def _cut(sizes: ModelSizes, layout: Layout, program: Program, blocks: Sequence[int]) -> Cut:
    """Return the cut into stages. blocks: as for `step_times`."""
    if blocks:
        return cut_of(blocks, stage_ranks(layout.schedule, layout.pp, layout.stages_per_rank))
    return usual_cut(sizes, layout.schedule, layout.pp, layout.stages_per_rank, program.equal_stages)


def _stage(parts: _Parts, kind: StageKind) -> Stage:
    """Return the seconds of the forward and of the backward pass of a stage."""
    forward, backward = (
        kind.blocks * sum(parts.block[index])
        + sum(parts.extra) / 2
        + kind.first * sum(parts.embedding[index])
        + kind.last * sum(parts.head[index])
        for index in (0, 1)
    )
    return forward, backward


def _cores(layout: Layout, cluster: Cluster) -> float:
    """Return how many ranks of each pipeline can compute at the same time."""
    pipelines = max(1, min(layout.ranks, cluster.per_node) // layout.pp)
    return cluster.gpu.at_once / pipelines if cluster.gpu.is_host else inf


def _taking_turns(times: Times, passes: float, layout: Layout, cut: Cut, cluster: Cluster, program: Program) -> Times:
    """Return the times of CPU ranks, which share cores. passes: the seconds of a rank's passes, if it had a core.

    The length of a pipeline's step knows of the cores already: while a rank waits, others compute. A rank that takes
    turns also loses time whenever it waits for another one, as long as the cores compute a third one.
    """
    gpu, ranks = cluster.gpu, min(layout.ranks, cluster.per_node)
    slower = max(1.0, ranks / gpu.at_once)
    in_passes = slower if layout.pp == 1 else min(slower, 1 + times.bubble / passes)
    scaled = {name: in_passes * value for name, value in vars(times).items()}
    scaled["bubble"] = max(0.0, passes + times.bubble - in_passes * passes)
    for name in ("pipeline", "data", "optimizer"):
        scaled[name] = slower * getattr(times, name)
    if ranks > ceil(gpu.at_once):
        waits = _waits(layout, layout.micro_batches * cut.last_blocks, program)
        for name, count in zip(("tensor", "context", "pipeline"), waits, strict=True):
            scaled[name] += count * gpu.wait_seconds
    return Times(**scaled)


def _waits(layout: Layout, blocks: int, program: Program) -> tuple[int, int, int]:
    """Return how often a rank waits for others of its dimensions tp, cp and pp. blocks: those of all its micro-batches.

    A backward pass of ring attention passes gradients on too. A message between stages has two ends.
    """
    passes = 3 if layout.recompute == "full" else 2
    messages = 2 * layout.micro_batches * layout.stages_per_rank if layout.pp > 1 else 0
    return passes * _collectives(layout.tp, program) * blocks, (passes + 1) * (layout.cp - 1) * blocks, 2 * messages


def _collectives(tp: int, program: Program) -> int:
    """Return the collectives of tensor-parallel ranks in one pass of a block."""
    return 0 if tp == 1 else 4 if program.sequence_parallel else 2


def _rank_pass(parts: _Parts, cut: Cut) -> Pass:
    """Return the passes of one micro-batch on the rank of the last stage."""
    total = Pass()
    for index in cut.of_last:
        blocks, first, last = cut.kinds[index]
        total = total.plus(parts.extra).plus(parts.block[0], blocks).plus(parts.block[1], blocks)
        if first:
            total = total.plus(parts.embedding[0]).plus(parts.embedding[1])
        if last:
            total = total.plus(parts.head[0]).plus(parts.head[1])
    return total


def _message(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> float:
    link = cluster.link(2, layout.tp * layout.cp * layout.dp)
    elements = work.tokens(sizes, layout.share) * sizes.width
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
def _parts(sizes: ModelSizes, share: Share, cluster: Cluster, program: Program) -> _Parts:
    """Return the passes of the parts of a model for one micro-batch."""
    gpu, size = cluster.gpu, float(program.parameter_bytes * work.tokens(sizes, share) * sizes.width)
    edge = collectives.all_reduce(size, share.tp, cluster.link(share.tp, 1))

    def passed(part: Work, tensor: float = 0.0) -> Pass:
        return _passed(gpu, _device(gpu, program, part)._replace(tensor=tensor), (part,), 0.0)

    looked_up, embedded_back = work.embedding(sizes, share)
    head, head_back = work.head(sizes, share, program)
    return _Parts(
        _block(sizes, share, cluster, program),
        (passed(looked_up, edge), passed(embedded_back)),
        (passed(head), passed(head_back, edge)),
        Pass(launches=2 * program.pass_operators * gpu.host_seconds),
    )


def _block(sizes: ModelSizes, share: Share, cluster: Cluster, program: Program) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of a block, which computes the former again for `full` recomputation."""
    gpu = cluster.gpu
    first, second = work.block(sizes, share, program)
    again = work.recomputed(sizes, share, program)
    works = (second,) if again is None else (second, again)
    forward, backward = _device(gpu, program, first), _device(gpu, program, *works)
    tensor, tensor_back = (
        _tensor(sizes, share, cluster, program, each.products, again=each is backward) for each in (forward, backward)
    )
    context = _context(sizes, share, cluster, program, forward.attention)
    issued = _collectives(share.tp, program) * program.collective_operators
    ring, ring_back = (each * share.cp if gpu.is_host and share.cp > 1 else 0 for each in _RING)
    repeated = share.recompute == "full"
    return (
        _passed(gpu, forward._replace(tensor=tensor, context=context), (first,), issued + ring),
        _passed(
            gpu,
            backward._replace(
                tensor=tensor_back + repeated * tensor, context=context * (2 if share.recompute == "none" else 3)
            ),
            works,
            (1 + repeated) * issued + ring_back + repeated * ring,
        ),
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


def _tensor(sizes: ModelSizes, share: Share, cluster: Cluster, program: Program, products: float, again: bool) -> float:
    """Return the communication of tensor-parallel ranks in one pass of a block, which no product hides.

    products: the seconds of the pass's products. again: whether the inputs of the two products that gather are gathered
    once more, for the gradients of the weights: ranks that share the tokens keep only their own (arXiv:2205.05198,
    section 4.2.2).
    """
    tp = share.tp
    if tp == 1:
        return 0.0
    size = float(program.parameter_bytes * work.tokens(sizes, share) * sizes.width)
    link = cluster.link(tp, 1)
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


def _context(sizes: ModelSizes, share: Share, cluster: Cluster, program: Program, attention: float) -> float:
    """Return the communication of ring attention in the forward pass of a block, which attention does not hide.

    attention: the seconds of the pass's attention.
    """
    tp, cp = share.tp, share.cp
    if cp == 1:
        return 0.0
    keys = 2.0 * program.parameter_bytes * work.tokens(sizes, share) * -(-sizes.kv_heads // tp) * sizes.head_size
    if cluster.gpu.is_host:
        return (cp - 1) * collectives.send(keys, cluster.link(cp, tp))
    return overlap.ring_exposed(attention, collectives.send(keys, cluster.link(cp, tp)), cp)


def _update(
    sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program, cut: Cut, parts: _Parts
) -> tuple[float, float]:
    """Return the seconds of data-parallel communication that nothing hides, and those of the optimizer."""
    blocks = cut.last_blocks
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
