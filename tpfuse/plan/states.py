"""The bytes of parameters, gradients and the optimizer's state on a rank, at each stage of ZeRO.

| kind       | stage 0       | stage 1       | stage 2                          | stage 3                           |
|------------|---------------|---------------|----------------------------------|-----------------------------------|
| parameters | whole buckets | whole buckets | whole buckets                    | shards, which are the masters     |
| gradients  | whole buckets | whole buckets | sums of shards, a bucket unsent  | sums of shards, a unit unsent     |
| master     | whole         | shards        | shards                           |                                   |
| moments    | two, whole    | two of shards | two of shards                    | two of shards                     |
| buffers    |               |               | up to three gradient buffers     | gathered units, one that is sent  |

Parameters of a half type have float32 masters, and moments may be bfloat16. If several micro-batches accumulate whole,
stages 2 and 3 also hold whole gradients; those of parameters that both ends of a pipeline share do so at stage 2 in any
case. Virtual ranks accumulate whole, in more than one tensor (`tpfuse.comm.sum_order`). A bucket of one rank is held as
at stage 1, as one shard. The shapes of a block and of the parts outside the blocks give the buckets
(`tpfuse.zero.bucket_layout`), with their padding. If Muon updates the matrices of the blocks, these have one moment, in
float32, and buckets of their own.

The count has the buffers that exist during a whole step and, for buffers that come and go, the largest amount that
exists at the same time. ZeRO: arXiv:1910.02054.
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tpfuse.plan.sizes import ModelSizes, TrainingProgram
from tpfuse.zero.bucket_layout import ALIGNMENT, BUCKET_BYTES, Kind
from tpfuse.zero.reducer.direct import GRADIENT_BUFFERS
from tpfuse.zero.sharded_units import shard_dim

Shape = tuple[int, ...]


class RankPart(NamedTuple):
    """The part of a model that a pipeline rank has."""

    # The number of blocks.
    blocks: int
    # Whether the rank has the model's first and last stage, and whether these are on two ranks.
    first: bool
    last: bool
    apart: bool


class States(NamedTuple):
    """The bytes of a rank, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int


@cache
def states(
    sizes: ModelSizes,
    part: RankPart,
    tp: int,
    replicas: int,
    zero: int,
    accumulating: bool,
    pipelined: bool,
    program: TrainingProgram,
    copies: int = 1,
) -> States:
    """Return the bytes of a rank at a stage of ZeRO.

    replicas: the ranks that have the same parameters: data- and context-parallel ones. accumulating: whether a step has
    several micro-batches. pipelined: whether the rank is one of a pipeline. copies: those of the model at stage 3.
    Raise ValueError for a stage that does not exist.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"stage {zero}: expected 0, 1, 2 or 3")
    if zero == 3 and replicas > 1:  # else there is nothing to shard, as at stage 2
        return _fully_sharded(sizes, part, tp, replicas // copies, accumulating, pipelined, program)
    parameter, state, sent = program.parameter_bytes, program.state_bytes, program.reduce_bytes
    parameters = gradients = optimizer = buffers = unsent = 0
    reducers: dict[str, tuple[int, int]] = {}  # the buckets of each, and its largest bucket
    for group, found in buckets(sizes, part, tp, program.sequence_parallel, program.muon_steps > 0).items():
        moments = program.optimizer_bytes - (2 * program.moment_bytes - state if group == "muon" else 0)
        world = replicas * {"partial": tp, "tied": 2}.get(group, 1)
        stage = min(zero, 1 if world == 1 else 2)
        largest = 0
        for (elements, aligned), count in found.items():
            size = -(-aligned // (world * ALIGNMENT)) * world * ALIGNMENT
            largest = max(largest, size)
            parameters += count * size * parameter
            optimizer += count * (size if stage == 0 else size // world) * moments
            gradients += count * (size // world * state if stage == 2 else size * program.gradient_bytes)
            # The gradients that are not sent yet are in a buffer, or they wait for their bucket's turn.
            gradients += count * size * program.gradient_bytes * (program.subtrees or 0)
            if stage == 2 and accumulating and (program.accumulate == "whole" or group == "tied"):
                gradients += count * size * program.gradient_bytes
            elif stage == 2:
                unsent = max(unsent, elements * parameter)
            elif sent != program.gradient_bytes:  # gradients are rounded into a buffer of their own
                buffers += count * size * sent
            if stage == 1 and world > 1 and sent != state:  # and so are the sums of what is sent in less than float32
                buffers += count * size // world * state
        if stage == 2:
            count, most = reducers.get(group.removeprefix("muon"), (0, 0))
            reducers[group.removeprefix("muon")] = count + found.total(), max(most, largest)
    for count, largest in reducers.values():
        buffers += min(GRADIENT_BUFFERS, count) * largest * sent
    gradients += _heads(sizes, part, tp, program)
    return States(parameters, gradients + unsent, optimizer, buffers)


def _fully_sharded(
    sizes: ModelSizes,
    part: RankPart,
    tp: int,
    world: int,
    accumulating: bool,
    pipelined: bool,
    program: TrainingProgram,
) -> States:
    """Return the bytes of a rank at stage 3 (`tpfuse.zero.fully_sharded`).

    The unit that computes and the next one are gathered at the same time, and the model's own parameters always; in a
    step of a pipeline all units are. The gradients of one unit are whole: as they arrive, and as they are sent.
    """
    block, block_shard = _unit(tuple(shape for _, shape in _block(sizes, tp, True)), world)
    rest, rest_shard = _unit(tuple(shape for _, shape in _ends(sizes, part, tp, True)), world)
    whole, shard = part.blocks * block + rest, part.blocks * block_shard + rest_shard
    parameter, state, sent = program.parameter_bytes, program.state_bytes, program.reduce_bytes
    gathered = (rest_shard + (part.blocks if pipelined else min(2, part.blocks)) * block_shard) * world
    if world == 1:
        gathered = whole if parameter < state else 0
    gradients = shard * state + max(block, rest) * parameter
    if accumulating and program.accumulate == "whole":
        gradients += whole * sent * (1 + (program.subtrees or 0)) + _heads(sizes, part, tp, program)
    buffers = gathered * parameter + max(block_shard, rest_shard) * world * sent
    _, matrices = _unit(tuple(shape for _, shape in _block(sizes, tp, True) if len(shape) > 1), world)
    by_muon = part.blocks * matrices * (program.muon_steps > 0)
    moments = 2 * (shard - by_muon) * program.moment_bytes + by_muon * state
    return States(shard * state, gradients, moments, buffers)


def _heads(sizes: ModelSizes, part: RankPart, tp: int, program: TrainingProgram) -> int:
    """Return the bytes of the gradients of a tied embedding as the head, which virtual ranks need apart."""
    if program.subtrees is None or not (sizes.tied and part.first and part.last):
        return 0
    return -(-sizes.table_parameters // tp) * program.gradient_bytes * (1 + program.subtrees)


@cache
def _unit(shapes: tuple[Shape, ...], world: int) -> tuple[int, int]:
    """Return the elements of a unit of stage 3, and those of a rank's shard with its padding."""
    shards = 0
    for shape in shapes:
        cut = shape[shard_dim(shape, world)]
        shards += -(-cut // world) * (math.prod(shape) // cut)
    return sum(map(math.prod, shapes)), shards


@cache
def buckets(
    sizes: ModelSizes, part: RankPart, tp: int, sequence_parallel: bool, muon: bool = False
) -> dict[str, Counter[tuple[int, int]]]:
    """Return the buckets of a rank by the ranks that reduce them together: "", "partial" and "tied".

    Each is (elements, elements with every parameter aligned), and counted. muon: whether Muon updates the matrices of
    the blocks, whose buckets are then under "muon" and not under "".
    """
    ends = _ends(sizes, part, tp, sequence_parallel)
    head = len(ends) - len(_first(sizes, tp, sequence_parallel)) * part.first
    pending: dict[str, tuple[int, int]] = {}
    found: dict[str, Counter[tuple[int, int]]] = {}
    block = [
        ("muon" if muon and len(shape) > 1 else str(kind), shape)
        for kind, shape in [*_block(sizes, tp, sequence_parallel)][::-1]
    ]
    for kind, shape in (*ends[:head], *block * part.blocks, *ends[head:]):
        count = math.prod(shape)
        elements, aligned = pending.get(kind, (0, 0))
        pending[kind] = elements + count, aligned + -(-count // ALIGNMENT) * ALIGNMENT
        if pending[kind][0] * 4 >= BUCKET_BYTES:
            found.setdefault(_group(kind), Counter())[pending.pop(kind)] += 1
    for name, bucket in pending.items():
        found.setdefault(_group(name), Counter())[bucket] += 1
    return found


def rank_parameters(sizes: ModelSizes, tp: int) -> int:
    """Return the number of parameters of a rank that has all blocks."""
    found = buckets(sizes, RankPart(sizes.layers, True, True, False), tp, True)
    return sum(elements * count for group in found.values() for (elements, _), count in group.items())


def _group(kind: str) -> str:
    return kind if kind in ("partial", "tied", "muon") else ""


def _block(sizes: ModelSizes, tp: int, sequence_parallel: bool) -> Iterator[tuple[Kind, Shape]]:
    """Yield the kind and the shape of each parameter of a block on one rank, in the model's order."""
    width, inner = sizes.width, -(-sizes.inner // tp)
    query, key = -(-sizes.heads // tp) * sizes.head_size, -(-sizes.kv_heads // tp) * sizes.head_size
    norm = _norm(sizes, tp, sequence_parallel)
    row: Kind = "replicated" if tp > 1 else "sharded"
    yield from norm
    if sizes.heads == sizes.kv_heads and not sizes.gated:  # one parameter has the weights of q, k and v, as in GPT-2
        packed_bias: Kind = "partial" if tp > 1 else "sharded"  # whole on every rank, which uses a part
        yield from _linear(sizes, packed_bias, (3, query, width), (3 * query * tp,))
    else:
        for rows in (query, key, key):
            yield from _linear(sizes, "sharded", (rows, width), (rows,))
    yield from _linear(sizes, row, (width, query), (width,))
    yield from norm
    if sizes.more_norms:
        yield norm[0][0], (sizes.more_norms,)
    if sizes.other_matrices:
        yield "sharded", (-(-sum(map(math.prod, sizes.other_matrices)) // tp), 1)
        return
    for _ in range(1 + sizes.gated):
        yield from _linear(sizes, "sharded", (inner, width), (inner,))
    yield from _linear(sizes, row, (width, inner), (width,))


def _linear(sizes: ModelSizes, bias: Kind, weight: Shape, biases: Shape) -> Iterator[tuple[Kind, Shape]]:
    yield "sharded", weight
    if sizes.biases:
        yield bias, biases


def _norm(sizes: ModelSizes, tp: int, sequence_parallel: bool) -> list[tuple[Kind, Shape]]:
    kind: Kind = "sharded" if tp == 1 else "partial" if sequence_parallel else "replicated"
    return [(kind, (sizes.width,))] * (1 + sizes.norm_bias)


def _first(sizes: ModelSizes, tp: int, sequence_parallel: bool) -> list[tuple[Kind, Shape]]:
    """Return the embeddings, in the order in which their gradients arrive."""
    kind, _ = _norm(sizes, tp, sequence_parallel)[0]
    positions = [(kind, (sizes.positions, sizes.width))] if sizes.positions else []
    return [*positions, ("sharded", (-(-sizes.vocabulary // tp), sizes.width))]


def _ends(sizes: ModelSizes, part: RankPart, tp: int, sequence_parallel: bool) -> list[tuple[Kind, Shape]]:
    """Return the parameters outside the blocks: the head and the last norm, and then the embeddings."""
    found: list[tuple[Kind, Shape]] = []
    table: Shape = (-(-sizes.vocabulary // tp), sizes.width)
    if part.last:
        if part.apart or not part.first or not sizes.tied:
            found.append(("sharded", table))
        found += _norm(sizes, tp, sequence_parallel)
    if part.first:
        found += _first(sizes, tp, sequence_parallel)
    if not (sizes.tied and part.apart):
        return found
    return [("tied", shape) if shape == table and kind == "sharded" else (kind, shape) for kind, shape in found]
