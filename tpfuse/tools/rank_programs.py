"""Programs of one rank for each communicating operator, for ranks in one process (`tpfuse.testing.one_process`).

The programs call the classes that models use, so that they test what these classes launch, wait for and copy. A program
takes three sets of inputs in turn: since a slot has two halves, data of an earlier round are never the right numbers.
The inputs are whole numbers, so that products and sums are exact in any order. If results are rounded, those of the
first rounds are compared with float64, and those of later rounds must equal the first ones to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import FusedCollectives, most_programs, open_channel
from tpfuse.comm.comparison import error_bound
from tpfuse.comm.messages.base import Route
from tpfuse.comm.messages.fused import FusedMessages
from tpfuse.comm.messages.symmetric import name_of
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels import reference
from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.fused import FusedRing
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.testing.compare import Expected, check_error
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.one_process import set_epochs
from tpfuse.tools.operators.adamw import RATES

VARIANTS = 3
_WRAP = 2**31  # the epoch that becomes negative
_NO_ENGINES = 2**62  # bytes
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one rank.

    rows, k and n are those of a product, elements those of a collective or a message, tokens, heads and head_size those
    of attention, and shard is the elements of AdamW's shard.
    """

    dtype: torch.dtype = torch.bfloat16
    rows: int = 1000
    k: int = 512
    n: int = 2048
    elements: int = 100_000
    tokens: int = 500
    heads: int = 4
    head_size: int = 64
    shard: int = 100_000


TINY = Sizes(torch.float32, 3, 8, 5, 7, 8, 1, 16, 40)  # for the interpreter
ALONE = Sizes(torch.float32, 70, 48, 40, 1003, 40, 1, 24, 1003)  # of a rank without peers, for `tpfuse verify`

# A result's name -> (plain torch's result in its dtype, the exact result, the largest error that it may have)
Expectation = dict[str, tuple[Tensor, Tensor, float]]


class RankProgram:
    """The work that a rank repeats. rounds: for each set of inputs its results and what they must be."""

    def __init__(self, rounds: Sequence[tuple[Callable[[], Tensors], Callable[[], Expectation]]]) -> None:
        self._rounds = rounds

    def run(self, variant: int) -> Tensors:
        """Launch one round with a set of inputs, and return its results, which the next round may overwrite."""
        return self._rounds[variant][0]()

    def expected(self, variant: int) -> Expectation:
        """Return what the results of `run(variant)` must be."""
        return self._rounds[variant][1]()

    def check(self, variant: int, results: Tensors) -> None:
        """Raise AssertionError if the results of `run(variant)` are wrong."""
        for name, expected in self.expected(variant).items():
            check_error(name, results[name], *expected)


def _exactly(expected: Tensors) -> Callable[[], Expectation]:
    return lambda: {name: (x, x, 0.0) for name, x in expected.items()}


def _bounded(plain: Tensors, exact: Tensors) -> Expectation:
    return {name: (x, exact[name], error_bound(x, exact[name])) for name, x in plain.items()}


def _whole(seed: int, *shape: int, memory: SymmetricMemory, dtype: torch.dtype) -> Tensor:
    """Return a tensor of -1, 0 and 1. Sums of some hundred of its products are exact in bfloat16."""
    return integers(seed, *shape, low=-1, high=1, dtype=dtype).to(memory.device)


def _laid_out(weight: Tensor, memory: SymmetricMemory, engines: bool, seed: int) -> Tensor:
    """Return the weight, transposed in memory for copy engines and in the second round of a rank without peers."""
    return weight.t().contiguous().t() if engines or (memory.world == 1 and seed == 1) else weight


def all_gather_gemm(memory: SymmetricMemory, sizes: Sizes, *, engines: bool) -> RankProgram:
    """Return the program of swiglu(all_gather(x) Wᵀ + bias); programs of the product, or copy engines, copy the shards.

    Some weights are transposed in memory (`_laid_out`), as in the backward pass of a row-parallel layer.
    """
    products = FusedLinear(memory, 1 if engines else _NO_ENGINES)
    plain_weight = _whole(1, 2 * sizes.n, sizes.k, memory=memory, dtype=sizes.dtype)
    bias = _whole(2, 2 * sizes.n, memory=memory, dtype=sizes.dtype)
    rounds = []
    for seed in range(VARIANTS):
        xs = _whole(10 + seed, memory.world, sizes.rows, sizes.k, memory=memory, dtype=sizes.dtype)
        weight = _laid_out(plain_weight, memory, engines, seed)

        def run(x: Tensor = xs[memory.rank], weight: Tensor = weight) -> Tensors:
            ((out, preactivation),) = products.all_gather(x, [weight], [bias], "swiglu", True)
            assert preactivation is not None
            return {"out": out, "preactivation": preactivation}

        def expected(xs: Tensor = xs) -> Expectation:
            def results(dtype: torch.dtype) -> Tensors:
                x, w, b = (tensor.to(dtype) for tensor in (xs.flatten(0, 1), plain_weight, bias))
                return {"out": reference.linear(x, w, b, "swiglu"), "preactivation": reference.linear(x, w, b)}

            return _bounded(results(sizes.dtype), results(torch.float64))

        rounds.append((run, expected))
    return RankProgram(rounds)


def gemm_reduce_scatter(memory: SymmetricMemory, sizes: Sizes, *, engines: bool) -> RankProgram:
    """Return the program of reduce_scatter(x Wᵀ) + bias + residual and of all_reduce(x Wᵀ).

    Programs of the product, or copy engines, move the partial sums. The all-reduce is a reduce-scatter followed by an
    all-gather. Some weights are transposed in memory (`_laid_out`), as in a backward pass.
    """
    products = FusedLinear(memory).variant(engines=engines, other_tiles=False)
    rank, world = memory.rank, memory.world
    plain_weight = _whole(1, sizes.n, sizes.k, memory=memory, dtype=sizes.dtype)
    bias = _whole(2, sizes.n, memory=memory, dtype=sizes.dtype)
    rounds = []
    for seed in range(VARIANTS):
        xs = _whole(10 + seed, world, world * sizes.rows, sizes.k, memory=memory, dtype=sizes.dtype)
        residual = _whole(20 + seed, sizes.rows, sizes.n, memory=memory, dtype=sizes.dtype)
        weight = _laid_out(plain_weight, memory, engines, seed)
        partial_sums = (xs.float() @ weight.float().t()).to(sizes.dtype).float()  # in the dtype in which they are moved
        sums = partial_sums.sum(0)
        scattered_sum = sums.view(world, sizes.rows, -1)[rank] + bias.float() + residual.float()
        expected = {"scattered": scattered_sum.to(sizes.dtype), "reduced": sums.to(sizes.dtype)}

        def run(x: Tensor = xs[rank], weight: Tensor = weight, residual: Tensor = residual) -> Tensors:
            scattered = products.reduce_scatter(x, weight, bias, residual)
            return {"scattered": scattered, "reduced": products.all_reduce(x, weight, None, None)}

        rounds.append((run, _exactly(expected)))
    return RankProgram(rounds)


def collectives(memory: SymmetricMemory, sizes: Sizes) -> RankProgram:
    """Return the program of all_gather, reduce_scatter, all_to_all, and all_reduce in two shots and, of few, in one."""
    launched, (rank, world) = FusedCollectives(memory), (memory.rank, memory.world)
    few = min(sizes.elements, 1000)
    launched.one_shot_bytes = world * few * sizes.dtype.itemsize
    rounds = []
    for seed in range(VARIANTS):
        xs = _whole(seed, world, world, sizes.elements, memory=memory, dtype=sizes.dtype)
        total = xs.float().sum(0).to(sizes.dtype)
        expected = {
            "all_gather": xs[:, 0],
            "all_to_all": xs[:, rank],
            "reduce_scatter": total[rank],
            "all_reduce": total,
            "all_reduce of few": total[0, :few],
        }

        def run(x: Tensor = xs[rank], expected: Tensors = expected) -> Tensors:
            out = {name: torch.empty_like(y, memory_format=torch.contiguous_format) for name, y in expected.items()}
            launched.all_gather(x[0], out["all_gather"])
            launched.reduce_scatter(x, out["reduce_scatter"])
            launched.all_to_all(x, out["all_to_all"])
            launched.all_reduce(x, out["all_reduce"])
            launched.all_reduce(x[0, :few].contiguous(), out["all_reduce of few"])
            return out

        rounds.append((run, _exactly(expected)))
    return RankProgram(rounds)


def messages(memory: SymmetricMemory, sizes: Sizes) -> RankProgram:
    """Return the program of one message from each rank to the next. Their epochs come from the host and do not wrap."""
    rank, world = memory.rank, memory.world
    routes = [Route(f"from rank {source}", source, (source + 1) % world, slots=2) for source in range(world)]
    source = (rank - 1) % world
    nbytes = sizes.elements * sizes.dtype.itemsize
    opened = memory.channel(partial(FusedMessages, routes=routes), name_of(routes), nbytes)
    rounds = []
    for seed in range(VARIANTS):
        xs = _whole(seed, world, sizes.elements, memory=memory, dtype=sizes.dtype)

        def run(x: Tensor = xs[rank]) -> Tensors:
            opened.send(rank, x)
            message = opened.receive(source, x.shape, x.dtype)
            received = message.tensor.clone()
            opened.release(source, message)
            return {"received": received}

        rounds.append((run, _exactly({"received": xs[source]})))
    return RankProgram(rounds)


def ring_attention(memory: SymmetricMemory, sizes: Sizes, *, ring: bool) -> RankProgram:
    """Return the program of causal attention, forward and backward (dq, then dk and dv).

    The blocks come from neighbours if `ring` is set, else from their owners.
    """
    attention, rank = FusedRing(memory), memory.rank
    layout = SequenceLayout(memory.world * sizes.tokens, memory.world, "zigzag")
    call = RingCall(layout.runs, rank, True, None, sizes.head_size**-0.5, ring=ring)
    rounds = []
    for seed in range(VARIANTS):
        shape = 1, sizes.heads, layout.length, sizes.head_size
        q, k, v, grad = (normal(4 * seed + i, *shape, dtype=sizes.dtype).to(memory.device) for i in range(4))
        shards = [layout.shard(x, rank, 2) for x in (q, k, v, grad)]

        def run(shards: list[Tensor] = shards) -> Tensors:
            q_shard, k_shard, v_shard, grad_shard = shards
            out, lse = attention.forward(q_shard, k_shard, v_shard, call)
            gradients = attention.backward(grad_shard, q_shard, k_shard, v_shard, out, lse, call)
            return {"out": out} | dict(zip("qkv", gradients, strict=True))

        expected = partial(_attention, layout, rank, {"q": q, "k": k, "v": v}, grad)
        rounds.append((run, expected))
    return RankProgram(rounds)


def _attention(layout: SequenceLayout, rank: int, inputs: Tensors, grad: Tensor) -> Expectation:
    """Return the output and the gradients of one rank's queries, keys and values.

    The log-sum-exp is rounded between forward and backward, which causes a relative error of the probabilities. The
    bound includes this error.
    """
    with torch.enable_grad():
        expected = Expected(lambda **x: reference.attention(**x)[0], inputs, grad)
    lse = reference.attention(*(inputs[name].double() for name in "qkv"))[1]
    rounding = lse.abs().max().item() * torch.finfo(torch.float32).eps
    return {
        name: (
            layout.shard(x, rank, 2),
            layout.shard(expected.float64[name], rank, 2),
            expected.bound(name) + rounding * expected.float64[name].abs().max().item(),
        )
        for name, x in expected.same_dtype.items()
    }


_STEP, _LR, _CLIP = 3, 1e-3, 0.5
_SUMS = ("summed by the update", "summed before")


def sharded_adamw(memory: SymmetricMemory, sizes: Sizes) -> RankProgram:
    """Return the program of two updates of a shard.

    The first update is a single launch, which sums gradients, applies AdamW and writes new parameters to all ranks. For
    the second update, a separate launch first sums the gradients.
    """
    size, start = memory.world * sizes.shard, memory.rank * sizes.shard
    shard, device = slice(start, start + sizes.shard), memory.device
    _, endpoint = open_channel(memory, "sharded_adamw", 16, most_programs(memory))
    values, gradients = (memory.buffer(f"sharded_adamw: {x}", (size,), sizes.dtype) for x in ("values", "gradients"))
    lr, step, clip = (torch.full((1,), float(x), device=device) for x in (_LR, _STEP, _CLIP))
    squares = torch.zeros(endpoint.programs, dtype=torch.float64, device=device)
    rounds = []
    for seed in range(VARIANTS):
        first = normal(seed, size, dtype=sizes.dtype).to(device)
        every = [normal(10 + 7 * seed + rank, size, dtype=sizes.dtype).to(device) for rank in range(memory.world)]

        def run(first: Tensor = first, sent_gradients: Tensor = every[memory.rank]) -> Tensors:
            results: Tensors = {}
            for when in _SUMS:
                summed = when == "summed before"
                values.local.copy_(first)
                gradients.local.copy_(sent_gradients)
                sums = torch.empty(sizes.shard, device=device)
                if summed:
                    shard_sum(gradients.local, gradients.addresses, sums, squares, start, endpoint)
                master = first[shard].float()
                mean, square = _moments(master)
                sent, addresses = (sums, None) if summed else (gradients.local, gradients.addresses)
                separate_master = None if sizes.dtype == torch.float32 else master
                sharded_adamw_(
                    values.local, values.addresses, sent, addresses, separate_master, mean, square,
                    start=start, decay_end=sizes.shard // 2, lr=lr, step=step, clip=clip, endpoint=endpoint, **RATES,
                )  # fmt: skip
                results |= {f"values, {when}": values.local.clone(), f"moments, {when}": square}
            return results

        rounds.append((run, partial(_adamw, memory.world, memory.rank, first, every)))
    return RankProgram(rounds)


def _moments(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp_avg and exp_avg_sq of an earlier step, which are exact in each dtype."""
    return parameter / 8, parameter.abs() / 4


def _adamw(world: int, rank: int, first: Tensor, every: list[Tensor]) -> Expectation:
    def updated(dtype: torch.dtype) -> Tensors:
        parts = []
        for owner in range(world):
            parameter, *gradients = (x.chunk(world)[owner].to(dtype) for x in (first, *every))
            numbers = RATES | {"decay_end": len(parameter) // 2, "clip": _CLIP, "lr": _LR, "step": _STEP}
            parts.append(reference.sharded_adamw(parameter, gradients, *_moments(parameter), **numbers))
        return {"values": torch.cat([part[0] for part in parts]), "moments": parts[rank][2]}

    plain, exact = updated(torch.float32), updated(torch.float64)
    plain["values"] = plain["values"].to(first.dtype)
    expected = _bounded(plain, exact)
    return {f"{name}, {when}": x for name, x in expected.items() for when in _SUMS}


PROGRAMS: dict[str, Callable[[SymmetricMemory, Sizes], RankProgram]] = {
    "all_gather_gemm": partial(all_gather_gemm, engines=False),
    "all_gather_gemm, copy engines": partial(all_gather_gemm, engines=True),
    "gemm_reduce_scatter": partial(gemm_reduce_scatter, engines=False),
    "gemm_reduce_scatter, copy engines": partial(gemm_reduce_scatter, engines=True),
    "collectives": collectives,
    "messages": messages,
    "ring_attention": partial(ring_attention, ring=True),
    "ring_attention, from owners": partial(ring_attention, ring=False),
    "sharded_adamw": sharded_adamw,
}


def load(memory: SymmetricMemory, name: str, sizes: Sizes) -> RankProgram:
    """Return a program of PROGRAMS that has run once with each set of inputs.

    If waits are aborted, these runs have no effect.
    """
    with torch.no_grad():
        program = PROGRAMS[name](memory, sizes)
        for variant in range(VARIANTS):
            program.run(variant)
    return program


def iterate(
    memory: SymmetricMemory, program: RankProgram, iterations: int, delay: Callable[[], object] = lambda: None
) -> list[int]:
    """Return the rounds, of `iterations`, in which this rank's results differ from the first ones of the same inputs.

    Each set of inputs first runs once and its results are checked. Then the epochs of all channels are set so that they
    wrap around within the rounds. delay: a function that is called before each round and may keep the rank's stream
    busy for a while. No result is read before the last round has been launched. Raise AssertionError if a first result
    is wrong.
    """
    firsts = []
    with torch.no_grad():
        for variant in range(VARIANTS):
            results = {name: x.clone() for name, x in program.run(variant).items()}
            program.check(variant, results)
            firsts.append(results)
        memory.barrier()
        set_epochs(memory, _WRAP - iterations // 2)
        memory.barrier()
        different = torch.zeros(iterations, dtype=torch.int64, device=memory.device)
        for turn in range(iterations):
            delay()
            for name, x in program.run(turn % VARIANTS).items():
                different[turn] += (x != firsts[turn % VARIANTS][name]).sum()
        return [turn for turn, count in enumerate(different.tolist()) if count]
