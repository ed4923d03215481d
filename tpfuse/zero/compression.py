"""Compression of gradients between nodes (`tpfuse.zero.reducer.inter_node`). Sums within a node stay exact.

| compression | data sent for m elements                                 | loss                                      |
|-------------|----------------------------------------------------------|-------------------------------------------|
| none        | m float32                                                | none                                      |
| bf16        | m bf16                                                   | the last 16 bits of each, at random       |
| powersgd-R  | R (rows + columns) float32 of each matrix, the rest    | the part outside of R directions,         |
|             |                                                          | until a later step sends it               |

Sums are computed in rank order and sent to all ranks, so every rank has the same sums to the bit, provided that all
ranks have the same kind of processor.

PowerSGD (arXiv:1905.13727) approximates the sum over ranks of one matrix M per rank. All ranks have the same thin
matrix Q. They compute P = Σ M Q, make P's columns orthonormal, and compute Q' = Σ Mᵀ P; the approximation of the sum is
P Q'ᵀ. Q' is the Q of the next step: this is power iteration across steps, so the span of P converges to the directions
in which gradients are large. The part of this rank's M outside of P's span, M - P Pᵀ M, is kept and added to the next
gradient, so every part of a gradient is sent eventually. (The paper subtracts P Q'ᵀ instead, which gives the same total
over ranks; but the differences between the ranks would grow in the remainders without being used.)

torch's powerSGD_hook takes a GradBucket, which only DDP can make, it averages, and a NaN stays in its state for ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpfuse.comm.collectives import collective
from tpfuse.comm.sum_order import sum_in_rank_order
from tpfuse.comm.traffic import Traffic
from tpfuse.parallel.initialize import seed_of
from tpfuse.zero.reducer.inter_node import Compression, Spans


def sum_over(x: Tensor, group: ProcessGroup, traffic: Traffic, *, sent: torch.dtype) -> None:
    """Replace x [m], which is contiguous, by its sum over the group, added in x's dtype. sent: the dtype that is sent.

    Two ranks send each other x. Among more ranks each rank sums one shard for all, and the sums are sent too, rounded
    once more: a rank then sends 2 (world - 1) / world of x instead of world - 1 times x.
    """
    world = group.size()
    if world == 2:
        parts = x.new_empty(world, x.numel(), dtype=sent)
        collective.start_all_gather(x.to(sent), parts, group).wait()
        sum_in_rank_order(parts.to(x.dtype).unbind(), x)
        traffic.exchange(parts[0].nbytes)
        return
    total = shard_of_sum(x, group, traffic, sent=sent).to(sent)
    parts = total.new_empty(world, total.numel())
    collective.start_all_gather(total, parts, group).wait()
    x.copy_(parts.view(-1)[: x.numel()])
    traffic.exchange((world - 1) * total.nbytes)


def shard_of_sum(x: Tensor, group: ProcessGroup, traffic: Traffic, *, sent: torch.dtype) -> Tensor:
    """Return this rank's shard of the sum of x [m] over the group, added in x's dtype. sent: the dtype that is sent.

    All shards have the same size; if the world does not divide m, the last ones end in zeros.
    """
    world = group.size()
    parts = x.new_zeros(world, -(-x.numel() // world), dtype=sent)
    parts.view(-1)[: x.numel()] = x
    received = torch.empty_like(parts)
    collective.start_all_to_all(parts, received, group).wait()
    total = x.new_empty(parts.shape[1])
    sum_in_rank_order(received.to(x.dtype).unbind(), total)
    traffic.exchange((world - 1) * parts[0].nbytes)
    return total


class Bf16Compression(Compression):
    """Gradients are sent in bfloat16 and summed in float32."""

    def all_reduce(self, x: Tensor, index: int, spans: Spans, group: ProcessGroup, traffic: Traffic) -> None:
        sum_over(x, group, traffic, sent=torch.bfloat16)

    def reduce_scatter(self, x: Tensor, index: int, spans: Spans, group: ProcessGroup, traffic: Traffic) -> Tensor:
        """See `Compression`: the sum is rounded once; `all_reduce` sends twice as many bytes."""
        return shard_of_sum(x, group, traffic, sent=torch.bfloat16)


_MatrixKey = tuple[int, int, int]  # (index of the group, index of the bucket, first element of the matrix)


@dataclass
class _MatrixState:
    error: Tensor  # the remainder, [rows, columns]
    factor: Tensor  # Q, [columns, rank]


class PowerSGDCompression(Compression):
    """Matrices are sent as two thin factors; the remainder that these leave out is added to the next step's gradient.

    rank: the rank of the factors. A matrix whose factors take more than half of its bytes is sent uncompressed, and so
    are the elements that belong to no matrix. seed: the seed of the first factors. The matrices of a bucket must be the
    same at every step. If a matrix is not finite on one rank, all ranks get NaN in it, and its state does not change.
    Nor does any in a step without an update. Gradients of all steps must have one scale: `scale_errors` changes it.

    The state belongs to one rank and takes as much memory as the matrices, and until the update twice as much.
    Checkpoints hold it for the same layout (`state_dict`). A run that resumes in another layout starts with new factors
    and without the remainders of its last step: it loses, once, as much of a gradient as every step defers to the next.
    """

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank {rank}: expected at least 1")
        self.rank, self.seed = rank, seed
        self._groups: dict[str, int] = {}
        self._states: dict[_MatrixKey, _MatrixState] = {}
        self._pending: dict[_MatrixKey, _MatrixState] = {}  # of the sums that no update has used yet

    @torch.no_grad()
    def all_reduce(self, x: Tensor, index: int, spans: Spans, group: ProcessGroup, traffic: Traffic) -> None:
        """Replace x [m] by its sum over the group, approximated in the matrices. Raise PeerTimeout.

        Two sums are communicated: that of the uncompressed elements and all P, then that of all Q'.
        """
        spans = [(at, m, n) for at, m, n in spans if 2 * self.rank * (m + n) <= m * n]
        views = [x[start : start + rows * columns].view(rows, columns) for start, rows, columns in spans]
        group_index = self._groups.setdefault(group.group_name, len(self._groups))
        keys = [(group_index, index, start) for start, _, _ in spans]
        states = [self._state_of(key, matrix) for key, matrix in zip(keys, views, strict=True)]
        for matrix, state in zip(views, states, strict=True):
            matrix += state.error
        projections = [matrix @ state.factor for matrix, state in zip(views, states, strict=True)]
        _sum_all([*_outside(x, spans), *projections], group, traffic)
        bases = [torch.linalg.qr(projection).Q for projection in projections]  # dependent columns too
        local_factors = [matrix.T @ basis for matrix, basis in zip(views, bases, strict=True)]
        factors = [factor.clone() for factor in local_factors]
        _sum_all(factors, group, traffic)
        for number, (key, matrix, state) in enumerate(zip(keys, views, states, strict=True)):
            basis, factor = bases[number], factors[number]
            finite = torch.isfinite(factor).all()  # the same on all ranks; the host does not wait for it
            error = torch.addmm(matrix, basis, local_factors[number].T, alpha=-1)
            self._pending[key] = _MatrixState(
                torch.where(finite, error, state.error), torch.where(finite, factor, state.factor)
            )
            torch.mm(basis, factor.T, out=matrix)

    def keep_pending(self) -> None:
        self._states |= self._pending
        self.drop_pending()

    def drop_pending(self) -> None:
        self._pending = {}

    def _state_of(self, key: _MatrixKey, matrix: Tensor) -> _MatrixState:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _MatrixState(torch.zeros_like(matrix), self._first_factor(key, matrix))
        if state.error.shape != matrix.shape:
            was, now = tuple(state.error.shape), tuple(matrix.shape)
            raise ValueError(f"bucket {key[1]}: the matrix at {key[2]} has shape {now}, but it had {was} before")
        return state

    def _first_factor(self, key: _MatrixKey, matrix: Tensor) -> Tensor:
        """Return normal numbers, drawn on the CPU so that all ranks of the group get the same.

        They depend on the seed and the matrix's place only: in a pipeline the ranks of a group number it differently.
        """
        generator = torch.Generator("cpu").manual_seed(seed_of(self.seed, key[1:]))
        factor = torch.empty(matrix.shape[1], self.rank, dtype=torch.float32).normal_(generator=generator)
        return factor.to(device=matrix.device, dtype=matrix.dtype)

    def scale_errors(self, factor: float) -> None:
        for matrix in self._states.values():
            matrix.error *= factor

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's errors and factors by "group.bucket.start", with groups numbered in order of first use."""
        return {
            ".".join(map(str, key)): {"error": matrix.error, "factor": matrix.factor}
            for key, matrix in self._states.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from the result of `state_dict`. Raise ValueError if its factors have another rank."""
        states = {}
        for name, tensors in state.items():
            group, index, start = map(int, name.split("."))
            if tensors["factor"].shape[1] != self.rank:
                raise ValueError(f"the state has factors of rank {tensors['factor'].shape[1]}: expected {self.rank}")
            states[group, index, start] = _MatrixState(tensors["error"].clone(), tensors["factor"].clone())
        self._states = states
        self.drop_pending()


def _outside(x: Tensor, spans: Spans) -> list[Tensor]:
    parts, end = [], 0
    for start, rows, columns in sorted(spans):
        parts.append(x[end:start])
        end = start + rows * columns
    return [part for part in (*parts, x[end:]) if part.numel()]


def _sum_all(tensors: Sequence[Tensor], group: ProcessGroup, traffic: Traffic) -> None:
    """Replace each tensor by its sum over the group, with one communication for all."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sum_over(flat, group, traffic, sent=flat.dtype)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def compression_of(name: str, *, seed: int = 0) -> Compression | None:
    """Return the compression of this name: "none", "bf16" or "powersgd-RANK". Raise ValueError for another name."""
    if name == "none":
        return None
    if name == "bf16":
        return Bf16Compression()
    kind, _, rank = name.partition("-")
    if kind == "powersgd" and rank.isdecimal() and int(rank):
        return PowerSGDCompression(int(rank), seed)
    raise ValueError(f"compression {name}: expected none, bf16, or powersgd-RANK with a rank from 1, as in powersgd-4")
