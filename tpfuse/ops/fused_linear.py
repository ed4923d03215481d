"""Tensor-parallel products as Triton programs that compute while shards arrive and partial sums leave.

An all-gather is part of the product behind it (`tpfuse.kernels.all_gather_gemm`), a reduce-scatter of the product
before it (`tpfuse.kernels.gemm_reduce_scatter`); both serve forward and backward. On CPUs they are interpreted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpfuse.comm.launched import LaunchedCollectives
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_reduce_scatter import gemm_reduce_scatter_forward
from tpfuse.kernels.gemm_weight_gradient import gemm_weight_gradient
from tpfuse.kernels.launch import multiprocessors
from tpfuse.ops.gemm import flat

_LEAST_SLOT = 2**16  # bytes; slots have the next power of two, so that few sizes serve all shapes


class _Channel:
    """One rank's end of a channel for slots of `nbytes`, and int32 words of its own for kernels to count in."""

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        """Collective."""
        programs = multiprocessors(memory.device)
        count = 2 * programs * memory.world
        slots = memory.buffer(f"{name}: slots", (2 * nbytes,), torch.uint8)
        flags, state = memory.signals(f"{name}: flags", count), memory.signals(f"{name}: state", 2)
        self.words = memory.signals(f"{name}: words", programs * memory.world).local
        self.endpoint = Endpoint(
            memory.rank,
            memory.world,
            slots=slots.addresses,
            slot_bytes=nbytes,
            flags=flags.addresses,
            flag_count=count,
            state=state.local,
            abort=memory.abort,
            programs=programs,
        )


class FusedLinear:
    """The products of one group's ranks. Tensors are float32, float16 or bfloat16, on the memory's device."""

    def __init__(self, memory: SymmetricMemory) -> None:
        """Collective."""
        self.memory = memory
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._collectives = LaunchedCollectives(memory)
        self._agreed: set[str] = set()

    def activates(self, x: Tensor) -> bool:
        """Activations are part of the products."""
        return True

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """(act(all_gather(x) Wᵀ + bias), pre-activation where it is to be kept) for each weight.

        The first product gathers; the others multiply what it has left.
        """
        rows = flat(x)
        several = len(weights) > 1
        op = f"all_gather_linear {x.dtype} {list(x.shape)}"
        out, kept, gathered = self._gathering_product(op, rows, weights[0], biases[0], activation, keep, several)
        found = [(out, kept)]
        for weight, bias in zip(weights[1:], biases[1:], strict=True):
            whole = gathered.flatten(0, 1)
            found.append(gemm_forward(whole, weight, bias, activation=activation, keep_preactivation=keep))
        shape = self.memory.world * len(x), *x.shape[1:-1]
        return [tuple(_shaped(y, shape) for y in pair) for pair in found]  # type: ignore[misc]

    def all_gather_backward(
        self,
        grads: Sequence[Tensor],
        x: Tensor,
        weights: Sequence[Tensor],
        preactivations: Sequence[Tensor | None],
        activation: str | None,
        needs: Sequence[tuple[bool, bool]],
        needs_x: bool,
    ) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
        """(dX, dWs, dbs). The gradients of several weights meet in one product, of all of them behind each other."""
        lefts = [flat(grad) for grad in grads]
        befores = [None if before is None else flat(before) for before in preactivations]
        grad_x = None
        if needs_x:
            left, weight, before = lefts[0], weights[0], befores[0]
            if len(weights) > 1:
                left, weight = torch.cat(lefts, 1), torch.cat(tuple(weights))
                before = None if before is None else torch.cat([y for y in befores if y is not None], 1)
            op = f"all_gather_linear backward {x.dtype} {list(x.shape)}"
            grad_x = self._product_scattering(op, left, weight.t(), preactivation=before, activation=activation)
            grad_x = grad_x.view(x.shape)
        found: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(weights)
        if any(weight or bias for weight, bias in needs):
            gathered = self._gathered(flat(x))
            for index, (weight_too, bias_too) in enumerate(needs):
                if weight_too or bias_too:
                    found[index] = gemm_weight_gradient(
                        lefts[index], gathered, befores[index], activation=activation, with_bias=bias_too
                    )
        grad_weights = [weight if need[0] else None for (weight, _), need in zip(found, needs, strict=True)]
        return grad_x, grad_weights, [bias for _, bias in found]

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """reduce_scatter(x Wᵀ) + bias + residual."""
        op = f"linear_reduce_scatter {x.dtype} {list(x.shape)}"
        added = None if residual is None else flat(residual)
        out = self._product_scattering(op, flat(x), weight, bias=bias, residual=added)
        return out.view(len(x) // self.memory.world, *x.shape[1:-1], len(weight))

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dX, dW, db), all from one all-gather of grad: the product that gathers it leaves it behind."""
        needs_x, needs_weight, needs_bias = needs
        rows, grad_x = flat(grad), None
        if needs_x:
            op = f"linear_reduce_scatter backward {grad.dtype} {list(grad.shape)}"
            keeps = needs_weight or needs_bias
            product, _, whole = self._gathering_product(op, rows, weight.t(), None, None, False, keeps)
            grad_x, gathered = product.view(x.shape), whole.flatten(0, 1)
        elif needs_weight or needs_bias:
            gathered = self._gathered(rows)
        if needs_weight:
            return grad_x, *gemm_weight_gradient(gathered, flat(x), with_bias=needs_bias)
        return grad_x, None, gathered.sum(0) if needs_bias else None

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """all_reduce(x Wᵀ) + bias + residual: each rank sums some of the rows, and gathers the others'."""
        rows, (rank, world) = flat(x), (self.memory.rank, self.memory.world)
        most = -(-len(rows) // world)
        own = slice(min(rank * most, len(rows)), min((rank + 1) * most, len(rows)))
        added = None if residual is None else flat(residual)[own]
        op = f"linear_all_reduce {x.dtype} {list(x.shape)}"
        sums = self._product_scattering(op, rows, weight, bias=bias, residual=added)
        padded = sums.new_zeros(most, sums.shape[1])
        padded[: len(sums)] = sums
        return self._gathered(padded)[: len(rows)].view(*x.shape[:-1], len(weight))

    def _gathering_product(
        self,
        op: str,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        keep: bool,
        keep_gathered: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(the product, its pre-activation, all ranks' rows [world, n, K]: whole where they are to be kept)."""
        self._agree(op)
        gathered = rows.new_empty(self.memory.world, *rows.shape)
        with self.memory.guard(op, kernel=True):
            channel = self._channel("all_gather_linear", rows.nbytes)
            out, kept = all_gather_gemm_forward(
                rows, weight, bias, gathered, channel.words, channel.endpoint,
                activation=activation, keep_preactivation=keep, keep_own=keep_gathered,
            )  # fmt: skip
        return out, kept, gathered

    def _product_scattering(
        self,
        op: str,
        rows: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        preactivation: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        self._agree(op)
        world = self.memory.world
        nbytes = -(-len(rows) // world) * world * len(weight) * rows.element_size()
        with self.memory.guard(op, kernel=True):
            channel = self._channel("linear_reduce_scatter", nbytes)
            return gemm_reduce_scatter_forward(
                rows, weight, channel.endpoint, channel.words,
                bias=bias, residual=residual, preactivation=preactivation, activation=activation,
            )  # fmt: skip

    def _gathered(self, rows: Tensor) -> Tensor:
        """All ranks' rows, [world * n, K]."""
        whole = rows.new_empty(self.memory.world, *rows.shape)
        self._collectives.all_gather(rows.contiguous().view(-1), whole.view(self.memory.world, -1))
        return whole.flatten(0, 1)

    def _agree(self, op: str) -> None:
        """Raises Disagreement where ranks bring different shapes: kernels would read past ends, or what is old.

        On CPUs always; on GPUs, where hosts would wait for each other, when a shape is new.
        """
        if self.memory.device.type == "cpu" or op not in self._agreed:
            self.memory.barrier(op)
            self._agreed.add(op)

    def _channel(self, name: str, nbytes: int) -> _Channel:
        size = max(_LEAST_SLOT, 1 << (nbytes - 1).bit_length())
        found = self._channels.get((name, size))
        if found is None:
            found = self._channels[name, size] = _Channel(self.memory, f"{name}, {size} bytes", size)
        return found


def _shaped(x: Tensor | None, rows: tuple[int, ...]) -> Tensor | None:
    return None if x is None else x.view(*rows, x.shape[-1])
