"""The bytes of parameters, gradients and the optimizer's state on a rank: `tpfuse.zero.memory` by formula.

The shapes of a block and of the parts outside the blocks give the number of elements of each kind of parameter
(`tpfuse.zero.bucket_layout`) and the sizes of the buckets. Padding is not counted, except at stage 3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.zero.bucket_layout import BUCKET_BYTES
from tpfuse.zero.fully_sharded import shard_dim
from tpfuse.zero.memory import MemoryAccount, Widths, states
from tpfuse.zero.reducer.direct import GRADIENT_BUFFERS

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """The parameters of a kind on one rank: their elements, and the number and the largest of their buckets."""

    elements: int
    buckets: int
    largest: int


@cache
def held(
    sizes: ModelSizes,
    part: tuple[int, bool, bool, bool],
    tp: int,
    replicas: int,
    stage: int,
    accumulating: bool,
    pipelined: bool,
    program: Program,
) -> MemoryAccount:
    """Return the bytes of a rank at a stage of ZeRO, with the buffers of the reduction.

    part: the number of blocks, whether the rank has the first and the last stage, and whether these are on two ranks.
    replicas: the ranks that have the same parameters: data- and context-parallel ones. accumulating: whether a step has
    several micro-batches. pipelined: whether the rank is one of a pipeline.
    """
    if stage == 3 and replicas * tp > 1:
        return _fully_sharded(sizes, part, tp, replicas, accumulating, pipelined, program)
    stage = min(stage, 2)
    size, gradient = program.parameter_bytes, program.gradient_bytes
    widths = Widths(size, gradient, gradient, program.state_bytes, 0)
    total, unsent, buffers = MemoryAccount(), 0, 0
    for kind, found in kinds(sizes, part, tp, program.sequence_parallel).items():
        world = replicas * {"partial": tp, "tied": 2}.get(kind, 1)
        total += states(found.elements, -(-found.elements // world), min(stage, 1) if world == 1 else stage, widths)
        if stage == 2 and world > 1:
            buffers += min(GRADIENT_BUFFERS, found.buckets) * found.largest * gradient
            if accumulating:
                total += MemoryAccount(gradients=found.elements * gradient)
            else:
                unsent = max(unsent, found.largest * size)
    return total + MemoryAccount(gradients=unsent, buffers=buffers)


def _fully_sharded(
    sizes: ModelSizes,
    part: tuple[int, bool, bool, bool],
    tp: int,
    world: int,
    accumulating: bool,
    pipelined: bool,
    program: Program,
) -> MemoryAccount:
    """Return the bytes of a rank at stage 3 (`tpfuse.zero.memory`).

    Two blocks are gathered at the same time, and all of them in a step of a pipeline.
    """
    layers, first, last, apart = part
    block, block_shard = _unit(tuple(shape for _, shape in _block(sizes, tp, True)), world)
    ends = tuple(
        shape for _, shape in (*_last(sizes, tp, True, last, apart or not first), *_first(sizes, tp, True, first))
    )
    rest, rest_shard = _unit(ends, world)
    whole, shard = layers * block + rest, layers * block_shard + rest_shard
    size, gradient, master = program.parameter_bytes, program.gradient_bytes, max(program.parameter_bytes, 4)
    moments = program.state_bytes - (master if master > size else 0)
    gathered = (rest_shard + (layers if pipelined else min(2, layers)) * block_shard) * world
    if world == 1:
        gathered = whole if size < master else 0
    unsent = max(block, rest) * size + (whole * gradient if accumulating else 0)
    buffers = gathered * size + max(block_shard, rest_shard) * world * gradient
    return states(whole, shard, 3, Widths(master, gradient, gradient, moments, 0)) + MemoryAccount(
        gradients=unsent, buffers=buffers
    )


@cache
def _unit(shapes: tuple[Shape, ...], world: int) -> tuple[int, int]:
    """Return the elements of a unit of stage 3, and those of a rank's shard with its padding."""
    shards = 0
    for shape in shapes:
        cut = shape[shard_dim(shape, world)]
        shards += -(-cut // world) * (math.prod(shape) // cut)
    return sum(map(math.prod, shapes)), shards


@cache
def kinds(sizes: ModelSizes, part: tuple[int, bool, bool, bool], tp: int, sequence_parallel: bool) -> dict[str, Kind]:
    """Return the parameters of a rank by the ranks that share them: "", "partial" and "tied"."""
    layers, first, last, apart = part
    tied = sizes.tied and apart and (first or last)
    pending: dict[str, int] = {}
    full: dict[str, list[int]] = {}
    parameters = [*_last(sizes, tp, sequence_parallel, last, apart or not first)]
    for _ in range(layers):
        parameters += reversed([*_block(sizes, tp, sequence_parallel)])
    parameters += _first(sizes, tp, sequence_parallel, first)
    for kind, shape in parameters:
        kind = (
            "tied" if tied and shape[0] == -(-sizes.vocabulary // tp) and len(shape) == 2 and kind == "table" else kind
        )
        kind = "sharded" if kind == "table" else kind
        pending[kind] = pending.get(kind, 0) + math.prod(shape)
        if pending[kind] * 4 >= BUCKET_BYTES:
            full.setdefault(kind, []).append(pending.pop(kind))
    for kind, elements in pending.items():
        full.setdefault(kind, []).append(elements)
    groups: dict[str, list[int]] = {}
    for kind, buckets in full.items():
        groups.setdefault(kind if kind in ("partial", "tied") else "", []).extend(buckets)
    return {kind: Kind(sum(buckets), len(buckets), max(buckets)) for kind, buckets in groups.items()}


def _block(sizes: ModelSizes, tp: int, sequence_parallel: bool) -> Iterator[tuple[str, Shape]]:
    """Yield the kind and the shape of each parameter of a block on one rank, in the model's order."""
    width, inner = sizes.width, sizes.inner // tp
    query, key = sizes.heads * sizes.head_size // tp, sizes.kv_heads * sizes.head_size // tp
    norm = _norm(sizes, tp, sequence_parallel)
    row = "replicated" if tp > 1 else "sharded"
    yield from norm
    if is_packed(sizes):
        packed_bias = "partial" if tp > 1 else "sharded"  # whole on every rank, which uses a part
        yield from _linear(sizes, packed_bias, (3, query, width), (3 * query * tp,))
    else:
        for rows in (query, key, key):
            yield from _linear(sizes, "sharded", (rows, width), (rows,))
    yield from _linear(sizes, row, (width, query), (width,))
    yield from norm
    for _ in range(1 + sizes.gated):
        yield from _linear(sizes, "sharded", (inner, width), (inner,))
    yield from _linear(sizes, row, (width, inner), (width,))


def is_packed(sizes: ModelSizes) -> bool:
    """Return whether one parameter holds the weights of q, k and v, as in GPT-2."""
    return sizes.heads == sizes.kv_heads and not sizes.gated


def _linear(sizes: ModelSizes, bias: str, weight: Shape, biases: Shape) -> Iterator[tuple[str, Shape]]:
    yield "sharded", weight
    if sizes.biases:
        yield bias, biases


def _norm(sizes: ModelSizes, tp: int, sequence_parallel: bool) -> list[tuple[str, Shape]]:
    kind = "sharded" if tp == 1 else "partial" if sequence_parallel else "replicated"
    return [(kind, (sizes.width,))] * (1 + sizes.norm_bias)


def _first(sizes: ModelSizes, tp: int, sequence_parallel: bool, here: bool) -> list[tuple[str, Shape]]:
    """Return the embeddings, in the order in which their gradients arrive."""
    if not here:
        return []
    kind = "sharded" if tp == 1 else "partial" if sequence_parallel else "replicated"
    positions = [(kind, (sizes.positions, sizes.width))] if sizes.positions else []
    return [*positions, ("table", (-(-sizes.vocabulary // tp), sizes.width))]


def _last(sizes: ModelSizes, tp: int, sequence_parallel: bool, here: bool, table: bool) -> list[tuple[str, Shape]]:
    """Return the head and the last norm. table: whether the rank does not have the embedding, if that is the head."""
    if not here:
        return []
    heads = [("table", (-(-sizes.vocabulary // tp), sizes.width))] if table or not sizes.tied else []
    return [*heads, *_norm(sizes, tp, sequence_parallel)]
