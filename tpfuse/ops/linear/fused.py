"""Tensor-parallel products as Triton programs that compute while shards arrive and partial sums leave.

An all-gather is part of the product after it (`tpfuse.kernels.all_gather_gemm`), a reduce-scatter part of the product
before it (`tpfuse.kernels.gemm_reduce_scatter`); both are used in forward and backward. Programs of the product itself
load small shards from the peers. Copy engines copy large shards chunk by chunk, on a stream of their own
(`tpfuse.ops.linear.engine_gather`), in backward while the other product of the layer runs. The product itself stores
partial sums in their owners' memory; copy engines copy them there (`tpfuse.ops.linear.engine_scatter`) if that was
measured to be faster. On CPUs the kernels are interpreted.

Each operator is one guard of the memory. The guard contains everything that reads the gathered rows, because the next
gather overwrites them.
"""

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.comm.channel import slot_size
from tpfuse.comm.collectives.fused import MOST_BYTES, check_slot, open_channel
from tpfuse.comm.cuda_calls import urgent_stream
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.all_gather import all_gather_forward
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm_reduce_scatter import gemm_reduce_scatter_forward
from tpfuse.kernels.launch import multiprocessors
from tpfuse.ops.gemm import flat, product, weight_gradient
from tpfuse.ops.linear.engine_gather import EngineGather
from tpfuse.ops.linear.engine_scatter import EngineScatter
from tpfuse.ops.linear.parallel_linear import joined

ENGINE_BYTES = 2**20  # on GPUs copy engines copy shards of this size or more: not measured yet


class _Channel:
    """A channel for slots of `nbytes`: one rank's end, with int32 words of its own in which kernels count."""

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        """Open the channel. The call is collective."""
        programs = multiprocessors(memory.device)
        _, self.endpoint = open_channel(memory, name, nbytes, programs)
        self.words = memory.signals(f"{name}: words", programs * memory.world).local


class _Copies:
    """The copies of one operation, on a stream that first waits for the current one; None on CPUs, which copy at once.

    The operation ends with `join`, even if it raises: afterwards the copied tensors may be freed or overwritten.
    """

    def __init__(self, stream: torch.cuda.Stream | None, device: torch.device) -> None:
        self._stream, self._device = stream, device
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that makes the stream of the copies the current one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the copies; do nothing at a second call."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream = None


@dataclass
class _Gather:
    """A gather of all ranks' rows [world, n, K] that has begun; if `keep`, all are there after their product.

    words, endpoint: for that product. copies: those of copy engines; None if the product copies the rows.
    """

    rows: Tensor
    gathered: Tensor
    words: Tensor
    endpoint: Endpoint
    keep: bool
    copies: _Copies | None


class FusedLinear:
    """The products of one group's ranks. Tensors are float32, float16 or bfloat16, on the memory's device."""

    def __init__(self, memory: SymmetricMemory, engine_bytes: int | None = None) -> None:
        """Prepare products on `memory`. All ranks create the object together.

        engine_bytes: copy engines copy shards of this size or more; default: ENGINE_BYTES on GPUs, never on CPUs.
        """
        self.memory = memory
        self._engine_bytes = ENGINE_BYTES if engine_bytes is None and memory.device.type == "cuda" else engine_bytes
        self._other_tiles = self._engines_scatter = False
        self._engine: torch.cuda.Stream | None = None

    def variant(self, *, engines: bool, other_tiles: bool) -> "FusedLinear":
        """Return a variant of these products for a measurement to compare; both share their channels.

        engines: whether copy engines move all shards and partial sums, or programs do; other_tiles: as in
        `tpfuse.kernels.configurations.choose_configuration`.
        """
        other = copy.copy(self)
        other._engine_bytes, other._engines_scatter = (0 if engines else None), engines
        other._other_tiles = other_tiles
        return other

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """See `ParallelLinear`. The first product gathers; the others multiply the rows that it has gathered."""
        op = f"all_gather_linear {x.dtype} {list(x.shape)}"
        check_slot(f"{op}: x", x.nbytes)
        several = len(weights) > 1
        with self.memory.guard(op, kernel=True), self._gathering(flat(x), keep=several, multiplied=True) as gather:
            pairs = [self._gather_and_multiply(gather, weights[0], biases[0], activation, keep)]
            for weight, bias in zip(weights[1:], biases[1:], strict=True):
                pairs.append(product(gather.gathered.flatten(0, 1), weight, bias, activation, keep))
        shape = self.memory.world * len(x), *x.shape[1:-1]
        return [
            (out.view(*shape, out.shape[-1]), None if kept is None else kept.view(*shape, kept.shape[-1]))
            for out, kept in pairs
        ]

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """See `ParallelLinear`. dX from several weights is one product, of all lefts and weights concatenated."""
        rows = [flat(left) for left in lefts]
        op = f"all_gather_linear backward {x.dtype} {list(x.shape)} dx {needs_x} dw {any(needs)}"
        with self.memory.guard(op, kernel=True):
            if not any(needs):
                return self._input_gradient(rows, x, weights) if needs_x else None, [None] * len(weights)
            with self._gathering(flat(x), keep=True, multiplied=False) as gather:
                grad_x = self._input_gradient(rows, x, weights) if needs_x else None
                gathered = self._gather_only(gather)
                return grad_x, [
                    weight_gradient(left, gathered) if needed else None
                    for left, needed in zip(rows, needs, strict=True)
                ]

    def _input_gradient(self, rows: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        left, weight = joined(rows, weights)
        return self._multiply_and_scatter(left, weight.t()).view(x.shape)

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        op = f"linear_reduce_scatter {x.dtype} {[*x.shape[:-1], len(weight)]}"
        added = None if residual is None else flat(residual)
        if any(each is not None and each.requires_grad for each in (x, weight, bias)):
            shard = len(flat(x)) // self.memory.world * len(weight) * x.element_size()
            check_slot(f"{op}: the gradient of this rank's rows", shard)
        with self.memory.guard(op, kernel=True):
            out = self._multiply_and_scatter(flat(x), weight, bias=bias, residual=added)
        return out.view(len(x) // self.memory.world, *x.shape[1:-1], len(weight))

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `ParallelLinear`. All comes from one all-gather of grad: the product that gathers it keeps the rows."""
        needs_x, needs_weight, needs_bias = needs
        op = f"linear_reduce_scatter backward {grad.dtype} {list(grad.shape)}"
        keep = needs_weight or needs_bias
        with self.memory.guard(op, kernel=True), self._gathering(flat(grad), keep=keep, multiplied=needs_x) as gather:
            grad_x = self._gather_and_multiply(gather, weight.t())[0].view(x.shape) if needs_x else None
            gathered = gather.gathered.flatten(0, 1) if needs_x else self._gather_only(gather)
            grad_weight = weight_gradient(gathered, x) if needs_weight else None
            return grad_x, grad_weight, gathered.sum(0) if needs_bias else None

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See `ParallelLinear`. Each rank sums some of the rows and gathers the others'.

        No product overlaps with that gather, so all programs of a grid copy rows.
        """
        rows, (rank, world) = flat(x), (self.memory.rank, self.memory.world)
        most = -(-len(rows) // world)
        own_rows = slice(min(rank * most, len(rows)), min((rank + 1) * most, len(rows)))
        added = None if residual is None else flat(residual)[own_rows]
        op = f"linear_all_reduce {x.dtype} {[*x.shape[:-1], len(weight)]}"
        check_slot(f"{op}: the sum of a rank's rows", most * len(weight) * x.element_size())
        with self.memory.guard(op, kernel=True):
            sums = _with_rows(self._multiply_and_scatter(rows, weight, bias=bias, residual=added), most)
            gathered = sums.new_empty(world * most, sums.shape[1])
            channel = self._channel("all_gather_linear", sums.nbytes)
            all_gather_forward(sums.view(-1), gathered.view(world, -1), channel.endpoint)
        return gathered[: len(rows)].view(*x.shape[:-1], len(weight))

    @contextlib.contextmanager
    def _gathering(self, x: Tensor, *, keep: bool, multiplied: bool) -> Iterator[_Gather]:
        """Begin a gather of the rows x [n, K]: start copy engines if the shard is large enough for them.

        Within the block the caller must call `_gather_and_multiply` if `multiplied`, and `_gather_only` otherwise.
        The current stream waits for the copies at the end of the block, even if it raises: x may be freed afterwards.
        """
        rows = x.detach().contiguous()  # copies are kept, and must not hold the graph of x
        world, nbytes = self.memory.world, rows.nbytes
        if self._engine_bytes is None or nbytes < self._engine_bytes or world == 1:
            channel = self._channel("all_gather_linear", nbytes)
            yield _Gather(rows, rows.new_empty(world, *rows.shape), channel.words, channel.endpoint, keep, None)
            return
        engines = self.memory.channel(EngineGather, "all_gather_linear by engines", slot_size(nbytes))
        copies = self._copies()  # on a stream that waits for what opened the channel
        try:
            with copies.stream():
                engines.send(rows, multiplied=multiplied, keep=keep)
            yield _Gather(rows, engines.chunks(rows), engines.ready, engines.endpoint, keep, copies)
        finally:
            copies.join()

    def _copies(self) -> _Copies:
        on_gpu = self.memory.device.type == "cuda"
        if on_gpu and self._engine is None:
            self._engine = _engine_stream(self.memory.device)
        return _Copies(self._engine if on_gpu else None, self.memory.device)

    def _gather_and_multiply(
        self,
        gather: _Gather,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (act(all ranks' rows Wᵀ + bias), its pre-activation if `keep`), and end the gather."""
        pair = all_gather_gemm_forward(
            gather.rows, weight, bias, gather.gathered, gather.words, gather.endpoint,
            activation=activation, keep_preactivation=keep,
            keep_own=gather.keep and gather.copies is None, copied=gather.copies is not None,
            other_tiles=self._other_tiles,
        )  # fmt: skip
        if gather.copies is not None:
            gather.copies.join()
        return pair

    def _gather_only(self, gather: _Gather) -> Tensor:
        """End a gather without a product and return all ranks' rows, [world * n, K]."""
        if gather.copies is not None:
            gather.copies.join()
        else:
            all_gather_forward(gather.rows.view(-1), gather.gathered.flatten(1), gather.endpoint)
        return gather.gathered.flatten(0, 1)

    def _multiply_and_scatter(
        self, rows: Tensor, weight: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Return this rank's rows of Σ over ranks of rows weightᵀ, + bias + residual, in several rounds if necessary.

        A round takes as many rows as the largest slot can hold.
        """
        world, chunk = self.memory.world, -(-len(rows) // self.memory.world)
        most = max(MOST_BYTES // max(world * len(weight) * rows.element_size(), 1), 1)
        if chunk <= most:
            return self._multiply_and_scatter_round(rows, weight, bias, residual)
        own_count = min(chunk, max(len(rows) - self.memory.rank * chunk, 0))
        whole = _with_rows(rows, world * chunk).view(world, chunk, rows.shape[1])
        added = None if residual is None else _with_rows(residual, chunk)
        rounds = []
        for start in range(0, chunk, most):
            part = slice(start, min(start + most, chunk))
            terms = None if added is None else added[part]
            rounds.append(self._multiply_and_scatter_round(whole[:, part].flatten(0, 1), weight, bias, terms))
        return torch.cat(rounds)[:own_count]

    def _multiply_and_scatter_round(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        world = self.memory.world
        nbytes = -(-len(rows) // world) * world * len(weight) * rows.element_size()
        if self._engines_scatter and world > 1:
            return self._multiply_and_scatter_by_engines(nbytes, rows, weight, bias, residual)
        channel = self._channel("linear_reduce_scatter", nbytes)
        return gemm_reduce_scatter_forward(
            rows, weight, channel.endpoint, bias=bias, residual=residual, other_tiles=self._other_tiles
        )

    def _multiply_and_scatter_by_engines(
        self, nbytes: int, rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        engines = self.memory.channel(EngineScatter, "linear_reduce_scatter by engines", slot_size(nbytes))
        copies = self._copies()  # on a stream that waits for what opened the channel
        product = len(rows), len(weight), rows.dtype
        try:
            with copies.stream():
                engines.open()
            engines.multiply(rows, weight, other_tiles=self._other_tiles)
            with copies.stream():
                engines.send(*product)
            return engines.sum(*product, bias, residual)
        finally:
            copies.join()

    def _channel(self, name: str, nbytes: int) -> _Channel:
        return self.memory.channel(_Channel, name, slot_size(nbytes))


def _with_rows(x: Tensor, count: int) -> Tensor:
    """Return x [m, n] with rows of zeros appended, `count` rows in all."""
    return x if len(x) == count else torch.cat([x, x.new_zeros(count - len(x), x.shape[1])])


def _engine_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of the highest priority, for the copies of shards.

    The launch before the copies needs a multiprocessor for a moment while a product, and perhaps NCCL's programs, fill
    all others, and the product waits for the copies after that launch. Warn if CUDA is told to run copies and programs
    one after another.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn("CUDA_DEVICE_MAX_CONNECTIONS=1: copies of shards will not overlap with products", stacklevel=2)
    return urgent_stream(device)
