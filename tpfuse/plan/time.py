"""The time of a training step, by kind.

The host issues operators ahead of the device. We estimate a pass, communication included, as hypot(host, device): about
the larger of the two when they differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import hypot
from typing import NamedTuple

from tpfuse.parallel.pipeline.order import order, stage_ranks
from tpfuse.parallel.pipeline.timeline import Timeline, timeline
from tpfuse.plan import communication, muon, work
from tpfuse.plan.bubble import Cut, StageKind, StageSeconds, cut_of, pass_seconds, step_length, usual_cut
from tpfuse.plan.hardware import Cluster, GpuSpec
from tpfuse.plan.in_flight import tied_apart
from tpfuse.plan.sizes import ModelSizes, RankLayout, RankShare, TrainingProgram
from tpfuse.plan.work import HALF, Work, product_seconds

# The fraction of the ideal overlap that products of tensor-parallel ranks achieve. torchtitan's asynchronous tensor
# parallelism on H100 (its pages on performance and on asynchronous TP) made steps 9 to 10 % faster. A timeline without
# competition would hide nearly all communication, which is 37 to 53 %. The products of tpfuse are not measured on GPUs
# yet.
HIDDEN_SHARE = 0.35
STEP_OPERATORS = 20  # of each step, beside those of its passes


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step on the rank that ends last, by kind. They add up to the time of the step."""

    # Matrix products.
    products: float = 0.0
    # Kernels of attention.
    attention: float = 0.0
    # Operators that the memory's bandwidth bounds.
    elementwise: float = 0.0
    # Communication of each dimension that nothing hides.
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    # Waiting for other pipeline ranks.
    bubble: float = 0.0
    # The optimizer's update.
    optimizer: float = 0.0
    # What kernels and their host need beyond the times above.
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

    def plus(self, other: "Pass", count: float = 1.0) -> "Pass":
        """Return the sum of this pass and `count` times the other."""
        return Pass(*(a + count * b for a, b in zip(self, other, strict=True)))


class _Parts(NamedTuple):
    """The forward and backward passes of the parts of a model."""

    block: tuple[Pass, Pass]
    embedding: tuple[Pass, Pass]
    head: tuple[Pass, Pass]
    # What a stage adds for the program's bookkeeping.
    extra: Pass


def step_times(
    sizes: ModelSizes, layout: RankLayout, cluster: Cluster, program: TrainingProgram, blocks: tuple[int, ...] = ()
) -> StepTimes:
    """Return the times of a step. It is fast: `tpfuse plan` calls it for tens of thousands of layouts.

    blocks: the number of blocks in each pipeline stage; () for the cut of `tpfuse train`.
    """
    parts, cut = _parts_of(sizes, layout, cluster, program), _cut(sizes, layout, program, blocks)
    last = _rank_pass(parts, cut)
    busy = layout.micro_batches * sum(last)
    length = busy
    waits = 0.0
    if layout.pp > 1:
        times = [_stage(parts, kind) for kind in cut.kinds]
        pipeline = layout.schedule, layout.pp, layout.stages_per_rank, layout.micro_batches
        length = step_length(*pipeline, cut, times)
        crossings = layout.pp * layout.stages_per_rank - 1
        waits = 2 * crossings * _message(sizes, layout, cluster, program) + _tied(sizes, layout, cluster, program)
    data, optimizer = _update(sizes, layout, cluster, program, cut, parts)
    count = layout.micro_batches
    kinds = {kind: count * seconds for kind, seconds in last._asdict().items()}
    kinds["launches"] += STEP_OPERATORS * cluster.gpu.host_seconds
    return StepTimes(**kinds, pipeline=waits, data=data, bubble=max(0.0, length - busy), optimizer=optimizer)


def simulated_step(
    sizes: ModelSizes, layout: RankLayout, cluster: Cluster, program: TrainingProgram, blocks: tuple[int, ...] = ()
) -> Timeline:
    """Return the passes of a step of a pipeline, in seconds, as the schedule orders them.

    blocks: as for `step_times`. A rank waits for each message from another rank.
    """
    parts, cut = _parts_of(sizes, layout, cluster, program), _cut(sizes, layout, program, blocks)
    times = [_stage(parts, kind) for kind in cut.kinds]
    return timeline(
        order(layout.schedule, layout.pp, layout.stages_per_rank, layout.micro_batches),
        lambda action: pass_seconds(times[cut.of_stages[action.stage]], action.kind),
        _message(sizes, layout, cluster, program),
    )


def _parts_of(sizes: ModelSizes, layout: RankLayout, cluster: Cluster, program: TrainingProgram) -> _Parts:
    """Return the passes of the parts of the model for a micro-batch."""
    return _parts(_without_layers(sizes), layout.share, cluster, program)


def _cut(sizes: ModelSizes, layout: RankLayout, program: TrainingProgram, blocks: Sequence[int]) -> Cut:
    """Return the cut into stages. blocks: as for `step_times`."""
    if blocks:
        return cut_of(blocks, stage_ranks(layout.schedule, layout.pp, layout.stages_per_rank))
    return usual_cut(sizes, layout.schedule, layout.pp, layout.stages_per_rank, program.equal_stages)


def _stage(parts: _Parts, kind: StageKind) -> StageSeconds:
    """Return the seconds of a stage's forward and backward passes."""
    forward, backward = (
        kind.blocks * sum(parts.block[index])
        + sum(parts.extra) / 2
        + kind.first * sum(parts.embedding[index])
        + kind.last * sum(parts.head[index])
        for index in (0, 1)
    )
    return forward, backward


def _rank_pass(parts: _Parts, cut: Cut) -> Pass:
    """Return the passes of one micro-batch on the rank of the last stage."""
    total = Pass()
    for index in cut.of_last:
        blocks, first, last = cut.kinds[index]
        total = total.plus(parts.extra)
        for count, part in ((blocks, parts.block), (first, parts.embedding), (last, parts.head)):
            total = total.plus(part[0], count).plus(part[1], count)
    return total


def _message(sizes: ModelSizes, layout: RankLayout, cluster: Cluster, program: TrainingProgram) -> float:
    link = cluster.link(layout.pp, layout.tp * layout.cp * layout.dp)
    elements = work.tokens(sizes, layout.share) * sizes.width
    return communication.send(float(program.parameter_bytes * elements), link)


def _tied(sizes: ModelSizes, layout: RankLayout, cluster: Cluster, program: TrainingProgram) -> float:
    """Return the seconds in which the first and the last stage add up the gradients of the table that they share.

    Stages of one rank have one table.
    """
    link = cluster.link(layout.pp, layout.tp * layout.cp * layout.dp)
    size = sizes.table_parameters / layout.tp * program.reduce_bytes
    shared = sizes.tied and tied_apart((layout.schedule, layout.pp, layout.stages_per_rank))
    return communication.all_reduce(size, 2, link) if shared else 0.0


@cache
def _without_layers(sizes: ModelSizes) -> ModelSizes:
    """Return the sizes on which the parts depend, which models of different depth share."""
    return replace(sizes, name="", layers=0)


@cache
def _parts(sizes: ModelSizes, share: RankShare, cluster: Cluster, program: TrainingProgram) -> _Parts:
    """Return the passes of the parts of a model for one micro-batch."""
    gpu, size = cluster.gpu, float(program.parameter_bytes * work.tokens(sizes, share) * sizes.width)
    edge = communication.all_reduce(size, share.tp, cluster.link(share.tp, 1))

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


def _block(sizes: ModelSizes, share: RankShare, cluster: Cluster, program: TrainingProgram) -> tuple[Pass, Pass]:
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
    issued = (0 if share.tp == 1 else 4 if program.sequence_parallel else 2) * program.collective_operators
    repeated = share.recompute == "full"
    return (
        _passed(gpu, forward._replace(tensor=tensor, context=context), (first,), issued),
        _passed(
            gpu,
            backward._replace(
                tensor=tensor_back + repeated * tensor, context=context * (2 if share.recompute == "none" else 3)
            ),
            works,
            (1 + repeated) * issued,
        ),
    )


def _device(gpu: GpuSpec, program: TrainingProgram, *works: Work) -> Pass:
    """Return the seconds of the device for works that it computes in one go."""
    size, slower = program.parameter_bytes, gpu.bandwidth * gpu.elementwise_share
    accumulated = sum(each.accumulated_bytes for each in works) / gpu.bandwidth
    return Pass(
        products=sum(product_seconds(product, gpu, size) for each in works for product in each.products),
        attention=sum(each.attention_flops for each in works) / (gpu.rate(size) * gpu.attention_share),
        elementwise=sum(each.elementwise_bytes for each in works) * size / HALF / slower + accumulated,
    )


def _passed(gpu: GpuSpec, device: Pass, works: tuple[Work, ...], collective: float) -> Pass:
    """Return the seconds of works on the device and the host. collective: the operators of communication."""
    operators = sum(each.operators for each in works) + collective
    host, seconds = operators * gpu.host_seconds, sum(device)
    return device._replace(launches=hypot(host, seconds + operators * gpu.launch_seconds) - seconds)


def _tensor(
    sizes: ModelSizes, share: RankShare, cluster: Cluster, program: TrainingProgram, products: float, again: bool
) -> float:
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
        return 2 * communication.all_reduce(size, tp, link)
    gathers = 4 if again else 2
    alone = (gathers + 2) * communication.all_gather(size, tp, link)  # and two reduce-scatters
    if not program.overlap_tp:
        return alone
    message = communication.send(size / tp, link)
    each = products / 4  # a block has four products; two of them gather and two scatter
    exposed = 2 * (communication.gather_exposed(each, message, tp) + communication.scatter_exposed(each, message, tp))
    return alone - HIDDEN_SHARE * max(0.0, alone - exposed)


def _context(
    sizes: ModelSizes, share: RankShare, cluster: Cluster, program: TrainingProgram, attention: float
) -> float:
    """Return the communication of ring attention in the forward pass of a block, which attention does not hide.

    attention: the seconds of the pass's attention.
    """
    tp, cp = share.tp, share.cp
    if cp == 1:
        return 0.0
    keys = 2.0 * program.parameter_bytes * work.tokens(sizes, share) * -(-sizes.kv_heads // tp) * sizes.head_size
    return communication.ring_exposed(attention, communication.send(keys, cluster.link(cp, tp)), cp)


def _update(
    sizes: ModelSizes, layout: RankLayout, cluster: Cluster, program: TrainingProgram, cut: Cut, parts: _Parts
) -> tuple[float, float]:
    """Return the seconds of data-parallel communication that nothing hides, and those of the optimizer."""
    blocks = cut.last_blocks
    one = sizes.block_parameters / layout.tp
    first = any(cut.kinds[index].first for index in cut.of_last)  # beside the head
    tables = 1 + (first and not sizes.tied)
    parameters = blocks * one + tables * sizes.table_parameters / layout.tp + first * sizes.positions * sizes.width
    ranks, stride = layout.dp * layout.cp, layout.tp
    shards = ranks if layout.zero else 1
    # Adam reads and writes its state, and reads and writes the gradient twice: for its norm and to clear it.
    moved = parameters * (2 * program.optimizer_bytes + 4 * program.gradient_bytes + program.parameter_bytes)
    exchange = matrices = 0.0
    if program.muon_steps:  # one moment less of the matrices
        moved -= blocks * sizes.block_weights / layout.tp * 2 * (2 * program.moment_bytes - program.state_bytes)
        exchange = muon.exchange_seconds(sizes, blocks, layout, cluster, program)
        matrices = muon.owner_seconds(sizes, blocks, layout, cluster, program)
    optimizer = moved / shards / cluster.gpu.bandwidth + matrices
    if ranks == 1:
        return exchange, optimizer
    forward, backward = blocks * sum(parts.block[0]), blocks * sum(parts.block[1])
    gradients, last = parameters * program.reduce_bytes, one * program.reduce_bytes
    across = partial(communication.grouped, ranks=ranks, stride=stride, cluster=cluster, reduce=layout.zero == 0)
    whole, end = across(gradients), across(last)
    data = communication.hidden_rest(whole, backward, end) if program.overlap_dp else whole
    if layout.zero > 1 and program.accumulate == "sharded":  # the earlier micro-batches communicate too
        behind = forward + backward  # the next micro-batch computes meanwhile
        each = communication.hidden_rest(whole, behind, 0.0) if program.overlap_dp else whole
        data += (layout.micro_batches - 1) * each
    if layout.zero:
        gather, start = (across(each * program.parameter_bytes) for each in (parameters, one))
        # Stage 3 gathers for each pass of a micro-batch; in a pipeline once in a step (`tpfuse.zero.fully_sharded`).
        passes = (0.0,) if layout.zero < 3 else (forward, backward) if layout.pp == 1 else (forward,)
        count = layout.micro_batches if layout.zero == 3 and layout.pp == 1 else 1
        hides = program.overlap_dp and layout.zero == 3
        data += count * sum(
            communication.hidden_rest(gather, seconds, start) if hides else gather for seconds in passes
        )
    return data + exchange, optimizer
