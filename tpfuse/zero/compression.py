"""Gradients in fewer bytes between nodes alone (`tpfuse.zero.reducer.inter_node`): within a node nothing is lost.

| compression | what crosses the network of m elements                   | what is lost                              |
|-------------|----------------------------------------------------------|-------------------------------------------|
| none        | m float32                                                | nothing                                   |
| bf16        | m bf16                                                   | 16 bits of each, at random                |
| powersgd    | rank (rows + columns) float32 of each matrix, the rest m | what is not in `rank` directions, until a |
|             |                                                          | later step sends it                       |

Sums are taken in rank order and given to all, so every rank has the same ones to the bit, as long as all have the same
kind of processor.

PowerSGD (arXiv:1905.13727), for the sum over ranks of a matrix M of each: P = Σ M Q for a thin Q, of which all have the
same; P's columns are made orthonormal; Q' = Σ Mᵀ P; the sum is taken to be P Q'ᵀ. Q' is the next step's Q, so that P
comes to span where gradients are large: power iteration across steps. What this rank's M has outside of P's span,
M - P Pᵀ M, is kept and added to the next gradient, so nothing is lost for good. (The paper subtracts P Q'ᵀ, which gives
the same total over ranks; but what the ranks differ by would grow in it without being used.)

torch's powerSGD_hook does not serve here: it takes a GradBucket, which only DDP can make, averages, waits for the
device, and keeps a NaN for ever.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.collectives import collective
from tpfuse.comm.rank_order import sum_in_rank_order
from tpfuse.comm.traffic import Traffic

MatrixSpan = tuple[int, int, int]
"""A matrix in a flat tensor: (first element, rows, columns)."""


def sum_over(x: Tensor, group: dist.ProcessGroup, traffic: Traffic, *, sent: torch.dtype) -> None:
    """x [m] contiguous becomes its sum over the group, taken in x's dtype; `sent` is what travels.

    Between two ranks that is x alone. Among more each sums a part for all, and the sums travel as well, rounded again:
    so 2 (world - 1) / world of x leave a rank, and not world - 1 of it.
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


def shard_of_sum(x: Tensor, group: dist.ProcessGroup, traffic: Traffic, *, sent: torch.dtype) -> Tensor:
    """This rank's of the group's equal parts of the sum of x [m] over it, taken in x's dtype; `sent` is what travels.

    Where m cannot be divided, the last parts end in zeros.
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


class Bf16Compression:
    """Gradients travel in bfloat16, and are summed in float32."""

    def all_reduce(
        self, x: Tensor, index: int, matrices: Sequence[MatrixSpan], group: dist.ProcessGroup, traffic: Traffic
    ) -> None:
        """x [m] becomes its sum over the group. Raises PeerTimeout."""
        sum_over(x, group, traffic, sent=torch.bfloat16)

    def reduce_scatter(
        self, x: Tensor, index: int, matrices: Sequence[MatrixSpan], group: dist.ProcessGroup, traffic: Traffic
    ) -> Tensor:
        """This rank's part of the sum, [m / world]: in half of the bytes that `all_reduce` takes, and rounded once."""
        return shard_of_sum(x, group, traffic, sent=torch.bfloat16)

    def scale_errors(self, factor: float) -> None:
        """Nothing is kept that would have to change with the scale of the gradients."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Empty: nothing is kept from one step to the next."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raises ValueError for a state of PowerSGD."""
        if state:
            raise ValueError("the state is of PowerSGD, not of compression in bfloat16")


_MatrixKey = tuple[int, int, int]  # of a matrix: group, bucket, first element


@dataclass
class _MatrixState:
    """What is kept of a matrix from one step to the next. error: [rows, columns]; factor: Q, [columns, rank]."""

    error: Tensor
    factor: Tensor


class PowerSGDCompression:
    """Matrices travel as two thin factors; what these leave out is added to the next step's gradient.

    rank: of the factors; a matrix that would not travel in half of its bytes or less is sent plain, as is what is no
    matrix. seed: of the first factors. The pieces of a bucket must be the same at every step. Where a matrix is not
    finite on one rank, all have NaN in it, and what is kept of it stays as it was: a step that is skipped does no harm.

    What is kept is the rank's own and takes as much memory as the matrices. Checkpoints hold it for the same layout
    (`state_dict`). A run that resumes in another layout starts with new factors and without the remainder of its last
    step: once, as much of a gradient is lost as is late in every step.
    """

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank {rank}: expected at least 1")
        self.rank, self.seed = rank, seed
        self._groups: dict[str, int] = {}
        self._states: dict[_MatrixKey, _MatrixState] = {}

    def gains(self, rows: int, columns: int) -> bool:
        """Whether a matrix takes at most half of its bytes as factors."""
        return 2 * self.rank * (rows + columns) <= rows * columns

    @torch.no_grad()
    def all_reduce(
        self, x: Tensor, index: int, matrices: Sequence[MatrixSpan], group: dist.ProcessGroup, traffic: Traffic
    ) -> None:
        """x [m] becomes its sum over the group, or nearly so in `matrices`. Raises PeerTimeout.

        Two sums: of what is sent plain and all P, then of all Q'.
        """
        matrices = [span for span in matrices if self.gains(*span[1:])]
        views = [x[start : start + rows * columns].view(rows, columns) for start, rows, columns in matrices]
        group_index = self._groups.setdefault(group.group_name, len(self._groups))
        keys = [(group_index, index, start) for start, _, _ in matrices]
        states = [self._state_of(key, matrix) for key, matrix in zip(keys, views, strict=True)]
        plain = _outside(x, matrices)
        for matrix, state in zip(views, states, strict=True):
            matrix += state.error
        projections = [matrix @ state.factor for matrix, state in zip(views, states, strict=True)]
        _sum_all([*plain, *projections], group, traffic)
        bases = [_orthonormal(projection) for projection in projections]
        local_factors = [matrix.T @ basis for matrix, basis in zip(views, bases, strict=True)]
        factors = [factor.clone() for factor in local_factors]
        _sum_all(factors, group, traffic)
        for matrix, state, basis, local_factor, factor in zip(
            views, states, bases, local_factors, factors, strict=True
        ):
            finite = torch.isfinite(factor).all()  # the same on all ranks, without a word to the host
            error = torch.addmm(matrix, basis, local_factor.T, alpha=-1)
            state.error = torch.where(finite, error, state.error)
            state.factor = torch.where(finite, factor, state.factor)
            torch.mm(basis, factor.T, out=matrix)

    def reduce_scatter(
        self, x: Tensor, index: int, matrices: Sequence[MatrixSpan], group: dist.ProcessGroup, traffic: Traffic
    ) -> Tensor:
        """This rank's part of the sum, [m / world], a view of x, which holds all of it."""
        self.all_reduce(x, index, matrices, group, traffic)
        return x.view(group.size(), -1)[group.rank()]

    def _state_of(self, key: _MatrixKey, matrix: Tensor) -> _MatrixState:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _MatrixState(torch.zeros_like(matrix), self._first_factor(key, matrix))
        if state.error.shape != matrix.shape:
            was, now = tuple(state.error.shape), tuple(matrix.shape)
            raise ValueError(f"bucket {key[1]}: the matrix at {key[2]} has shape {now}, and had {was} before")
        return state

    def _first_factor(self, key: _MatrixKey, matrix: Tensor) -> Tensor:
        """Normal, from (seed, place) alone, drawn on the CPU: equal on all ranks."""
        digest = hashlib.blake2b(f"{self.seed} {key}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        factor = torch.empty(matrix.shape[1], self.rank, dtype=torch.float32).normal_(generator=generator)
        return factor.to(device=matrix.device, dtype=matrix.dtype)

    def scale_errors(self, factor: float) -> None:
        """To be called when the scale of the gradients changes, as float16's loss scale does."""
        for matrix in self._states.values():
            matrix.error *= factor

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """This rank's errors and factors by "group.bucket.start", groups numbered as they came first."""
        return {
            ".".join(map(str, key)): {"error": matrix.error, "factor": matrix.factor}
            for key, matrix in self._states.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from such a state. Raises ValueError where its factors have another rank."""
        states = {}
        for name, tensors in state.items():
            group, index, start = map(int, name.split("."))
            if tensors["factor"].shape[1] != self.rank:
                raise ValueError(f"the state is of rank {tensors['factor'].shape[1]}, not {self.rank}")
            states[group, index, start] = _MatrixState(tensors["error"].clone(), tensors["factor"].clone())
        self._states = states


def _outside(x: Tensor, matrices: Sequence[MatrixSpan]) -> list[Tensor]:
    """The parts of x that are in none of the pieces."""
    parts, end = [], 0
    for start, rows, columns in sorted(matrices):
        parts.append(x[end:start])
        end = start + rows * columns
    return [part for part in (*parts, x[end:]) if part.numel()]


def _sum_all(tensors: Sequence[Tensor], group: dist.ProcessGroup, traffic: Traffic) -> None:
    """Replaces each by its sum over the group, all at once."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sum_over(flat, group, traffic, sent=flat.dtype)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _orthonormal(span: Tensor) -> Tensor:
    """Orthonormal columns that span those of `span` [rows, rank], also where these are zero or not independent."""
    basis: Tensor = torch.linalg.qr(span).Q
    return basis


def compression_of(name: str, *, rank: int = 4, seed: int = 0) -> Bf16Compression | PowerSGDCompression | None:
    """What the option says: "none", "bf16" or "powersgd". Raises ValueError."""
    if name == "none":
        return None
    if name == "bf16":
        return Bf16Compression()
    if name == "powersgd":
        return PowerSGDCompression(rank, seed)
    raise ValueError(f"compression {name!r}: expected none, bf16 or powersgd")
