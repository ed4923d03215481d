"""Muon's update of matrices of which ranks hold rectangles: each matrix is orthogonalised whole, by one rank.

    B = B + (1 - momentum) (G - B)                   the momentum, element by element
    D = G + momentum (B - G), or B without Nesterov
    P = (1 - lr weight_decay) P - lr scale O         O ≈ U Vᵀ of D = U S Vᵀ, by Newton-Schulz

(Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"; constants and operations are those of
torch.optim.Muon.) Only O needs whole matrices, so momentum and parameters stay in the shards in which AdamW keeps them.
In each step every rank sends its rectangles of D to the owners of the matrices; an owner computes O and sends each rank
its rectangles of that. Of ranks with the same rectangle one sends it, the owner itself if it is among them.

The owners are all ranks that have the same layers: data-, context- and tensor-parallel ones. The most expensive matrix
that is left goes to the rank with the least work so far. What is exchanged has the dtype in which Newton-Schulz
computes: bfloat16, as in torch.optim.Muon, or float64 for parameters in float64.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives.collective import set_timeout, start_all_to_all
from tpfuse.comm.layout import Slices
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.traffic import Traffic
from tpfuse.zero.muon_matrices import HiddenMatrix
from tpfuse.zero.reducer.shard_update import Staging, StateStore, blocks_of

AdjustedRate = Literal["original", "match_rms_adamw"]
AT_ONCE = 2**25  # elements that a rank sends together, on average: 64 MiB in bfloat16


@dataclass(frozen=True)
class MuonOptions:
    """The arguments of torch.optim.Muon; `adjust_lr_fn` has another default, with which AdamW's learning rate suits.

    lr, weight_decay: None for those of AdamW. adjust_lr_fn: what multiplies the learning rate of a matrix of m features
    out and n features in: "match_rms_adamw" 0.2 sqrt(max(m, n)) (arXiv:2502.16982), "original" sqrt(max(1, m / n)).
    Raise ValueError for numbers that no Muon has.
    """

    lr: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    eps: float = 1e-7
    adjust_lr_fn: AdjustedRate = "match_rms_adamw"

    def __post_init__(self) -> None:
        coefficients, adjusted = self.ns_coefficients, get_args(AdjustedRate)
        for name, right, expected in (
            ("lr", self.lr is None or 0 <= self.lr < math.inf, "at least 0"),
            ("weight_decay", self.weight_decay is None or 0 <= self.weight_decay < math.inf, "at least 0"),
            ("momentum", 0 <= self.momentum < 1, "from 0 to below 1"),
            ("eps", 0 <= self.eps < math.inf, "at least 0"),
            ("ns_steps", 0 < self.ns_steps < 100, "1 to 99"),
            ("ns_coefficients", len(coefficients) == 3 and all(map(math.isfinite, coefficients)), "three numbers"),
            ("adjust_lr_fn", self.adjust_lr_fn in adjusted, " or ".join(adjusted)),
        ):
            if not right:
                raise ValueError(f"Muon: {name} {getattr(self, name)}: expected {expected}")

    def rate(self, lr: float, given: float | None = None) -> float:
        """Return the learning rate of the matrices: the given one, that of the options, or AdamW's `lr`."""
        return next(rate for rate in (given, self.lr, lr) if rate is not None)

    def scale(self, matrix: HiddenMatrix) -> float:
        """Return what multiplies the learning rate of a matrix."""
        features_in, features_out = matrix.shape if matrix.transposed else matrix.shape[::-1]
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, features_out / features_in))
        return 0.2 * math.sqrt(max(features_out, features_in))


def orthogonalised(x: Tensor, options: MuonOptions) -> Tensor:
    """Return the matrices with the singular vectors of x and singular values near 1, in the dtype of x.

    An iteration of Newton and Schulz with a polynomial of degree 5; its coefficients make small singular values grow
    fast, and the result has values of about 0.7 to 1.2. A matrix of zeros stays zeros. x: [matrices, rows, columns].
    """
    a, b, c = options.ns_coefficients
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=options.eps)
    for _ in range(options.ns_steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[1] <= x.shape[2] else wide.mT


def update_momentum(
    gradient: Tensor,
    momentum: Tensor,
    direction: Tensor,
    factor: float,
    options: MuonOptions,
    store: StateStore,
    staging: Staging | None,
) -> None:
    """Update the momentum with the gradient times `factor`, and write what is to be orthogonalised to `direction`.

    All are [n]; a half type of gradients and the dtype of the exchange are converted. store, staging: as for
    `ShardUpdate`, whose state is the momentum.
    """
    for start, stop in blocks_of([momentum], store, staging):
        block = slice(start, stop)
        pair, state = (gradient[block], direction[block]), momentum[block]
        with nullcontext(pair) if staging is None else staging.host(*pair) as (given, out):
            given = given.to(state.dtype)
            if factor != 1.0:
                given = given * factor
            state.lerp_(given, 1 - options.momentum)
            out.copy_(given.lerp(state, options.momentum) if options.nesterov else state)


class _Part(NamedTuple):
    """The part of a matrix that a rectangle has. within: its index in the tensor of rectangle number `rectangle`."""

    matrix: int
    slices: Slices
    rectangle: int
    within: tuple[slice | int, ...]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.rectangle][self.within]


_Region = tuple[int, Slices]  # of a matrix, by its number


@dataclass
class _Round:
    """The matrices of one exchange, on this rank. Lists have an entry for each rank of the group."""

    sent: list[list[_Part]]  # what this rank sends to each owner
    received: list[list[_Region]]  # what it receives from each rank, as an owner
    returned: list[list[_Region]]  # what it returns to each rank, as an owner
    own: list[list[_Part]]  # what it gets back from each owner


class Muon:
    """Muon's update of matrices that the ranks of `group` hold as rectangles.

    rectangles: the parameter and the slices of each rectangle that this rank holds. dtype: of the parameters, or of
    their masters. device: on which owners compute. traffic: counts what is exchanged. alone: whether each matrix is
    orthogonalised by itself, so that its bits do not depend on how many an owner has. Collective. Raise PeerTimeout.
    """

    def __init__(
        self,
        matrices: Sequence[HiddenMatrix],
        rectangles: Sequence[tuple[str, Slices]],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        traffic: Traffic,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._matrices, self._group, self._device, self._traffic = matrices, group, device, traffic
        self.dtype = dtype if dtype is torch.float64 else torch.bfloat16
        numbers: dict[str, list[int]] = {}
        for number, matrix in enumerate(matrices):
            numbers.setdefault(matrix.name, []).append(number)
        self._parts = [
            _Part(number, inside, rectangle, within)
            for rectangle, (name, slices) in enumerate(rectangles)
            for number in numbers[name]
            for within, inside in matrices[number].parts(slices)
        ]
        own: list[_Region] = [(part.matrix, part.slices) for part in self._parts]
        if group is not None:
            set_timeout(group)
        held: list[list[_Region]] = exchange(own, group, op="gathering which ranks hold Muon's matrices")
        self.owners = _owners(matrices, held)
        self._rounds = list(self._plan(held))

    def _plan(self, held: list[list[_Region]]) -> Iterator[_Round]:
        """Yield the exchanges. held: the regions that each rank has, in its order."""
        rank, world = rank_and_size(self._group)
        holders: dict[_Region, list[int]] = {}
        for other, regions in enumerate(held):
            for region in regions:
                holders.setdefault(region, []).append(other)
        found = Counter[int]()
        for number, slices in holders:
            found[number] += _size(slices)
        for number, matrix in enumerate(self._matrices):
            assert found[number] == math.prod(matrix.shape), f"{matrix}: ranks hold {found[number]} elements of it"
        source = {
            region: self.owners[region[0]] if self.owners[region[0]] in ranks else ranks[region[0] % len(ranks)]
            for region, ranks in holders.items()
        }
        for together in self._together(world):
            ours = {number for number in together if self.owners[number] == rank}
            parts = [part for part in self._parts if part.matrix in together]
            by_owner = [[part for part in parts if self.owners[part.matrix] == owner] for owner in range(world)]
            yield _Round(
                [[part for part in to if source[part.matrix, part.slices] == rank] for to in by_owner],
                [[x for x in held[other] if x[0] in ours and source[x] == other] for other in range(world)],
                [[x for x in held[other] if x[0] in ours] for other in range(world)],
                by_owner,
            )

    def _together(self, world: int) -> Iterator[set[int]]:
        """Yield the numbers of the matrices of each exchange, one of each owner after another."""
        turns: list[int] = [0] * world
        order: list[tuple[int, int]] = []
        for number, owner in enumerate(self.owners):
            order.append((turns[owner], number))
            turns[owner] += 1
        together, elements = set[int](), 0
        for _, number in sorted(order):
            together.add(number)
            elements += math.prod(self._matrices[number].shape)
            if elements >= world * AT_ONCE:
                yield together
                together, elements = set(), 0
        if together:
            yield together

    def step(
        self,
        directions: Sequence[Tensor],
        parameters: Sequence[Tensor],
        lr: float,
        weight_decay: float,
        options: MuonOptions,
    ) -> None:
        """Update the parameters, or their masters. Collective. Raise PeerTimeout.

        lr: of the matrices (`MuonOptions.rate`). weight_decay: AdamW's, unless the options have another. directions,
        parameters: the tensors of this rank's rectangles. directions: of dtype `dtype`; what is orthogonalised replaces
        them.
        """
        weight_decay = weight_decay if options.weight_decay is None else options.weight_decay
        for each in self._rounds:
            self._orthogonalise(each, directions, options)
        for part in self._parts:
            parameter, direction = part.of(parameters), part.of(directions)
            rate = lr * options.scale(self._matrices[part.matrix])
            parameter.mul_(1 - lr * weight_decay).add_(direction.to(parameter.device), alpha=-rate)

    def _orthogonalise(self, each: _Round, directions: Sequence[Tensor], options: MuonOptions) -> None:
        sent = [[part.of(directions) for part in to] for to in each.sent]
        owned = dict.fromkeys(number for regions in each.received for number, _ in regions)
        alike: dict[tuple[int, int], list[int]] = {}
        for number in owned:
            alike.setdefault(self._matrices[number].shape, []).append(number)
        stacks = {x: torch.empty(len(n), *x, dtype=self.dtype, device=self._device) for x, n in alike.items()}
        whole = {number: part for x, numbers in alike.items() for number, part in zip(numbers, stacks[x], strict=True)}
        for (number, slices), values in self._exchange(sent, each.received):
            whole[number][_index(slices)] = values
            del values  # and with the last view what has arrived
        for shape, numbers in alike.items():
            whole |= zip(numbers, self._each(stacks.pop(shape), options), strict=True)
        back = [[whole[number][_index(slices)] for number, slices in to] for to in each.returned]
        own = [[(part.matrix, part.slices) for part in parts] for parts in each.own]
        parts = [part for parts in each.own for part in parts]
        for part, (_, values) in zip(parts, self._exchange(back, own), strict=True):
            part.of(directions).copy_(values)

    def _each(self, stack: Tensor, options: MuonOptions) -> Sequence[Tensor]:
        """Return the orthogonalised matrices of a stack: together if they may, since a GPU would wait for the host."""
        if not self._alone:
            return orthogonalised(stack, options).unbind()
        return [orthogonalised(matrix.unsqueeze(0), options)[0] for matrix in stack]

    def _exchange(self, sent: list[list[Tensor]], received: list[list[_Region]]) -> Iterator[tuple[_Region, Tensor]]:
        """Send tensors to each rank; yield (region, its values) of all that arrive from the first rank on."""
        empty = torch.empty(0, dtype=self.dtype, device=self._device)
        out = x = torch.cat([empty, *(tensor.reshape(-1) for to in sent for tensor in to)])
        if self._group is not None:
            sizes = [[_size(slices) for _, slices in regions] for regions in received]
            counts = [sum(tensor.numel() for tensor in to) for to in sent], [sum(row) for row in sizes]
            out = x.new_empty(sum(counts[1]))
            start_all_to_all(x, out, self._group, counts).wait()
            kept = counts[0][self._group.rank()]
            self._traffic.add((len(x) - kept) * x.itemsize, (len(out) - kept) * x.itemsize)
        start = 0
        for region in (region for regions in received for region in regions):
            size = _size(region[1])
            yield region, out[start : start + size].view([stop - first for first, stop in region[1]])
            start += size


def _owners(matrices: Sequence[HiddenMatrix], held: list[list[_Region]]) -> list[int]:
    """Return the owner of each matrix: the rank with the least work so far, and then the largest part of the matrix."""
    parts = [Counter[int]() for _ in held]
    for rank, regions in enumerate(held):
        for number, slices in regions:
            parts[rank][number] += _size(slices)
    owners, work = [0] * len(matrices), [0] * len(held)
    costs = [cost(*matrix.shape) for matrix in matrices]
    for number in sorted(range(len(matrices)), key=lambda number: -costs[number]):
        owner = min(range(len(held)), key=lambda rank: (work[rank], -parts[rank][number]))
        owners[number] = owner
        work[owner] += costs[number]
    return owners


def cost(rows: int, columns: int) -> int:
    """Return the operations of a step of Newton-Schulz: three products with the smaller side."""
    least, most = sorted((rows, columns))
    return 4 * least * least * most + 2 * least**3


def _size(slices: Slices) -> int:
    return math.prod(stop - start for start, stop in slices)


def _index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in slices)
