"""The check that ranks run the collectives of stage 3 in one order of units.

A rank that skips a unit, or runs units in another order, would add one unit's gradients to those of another unit of
its size. Neither `fully_shard` nor NCCL notices that.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist

from tpfuse.comm import collectives
from tpfuse.comm.errors import Disagreement, named

Operation = Literal["all_gather", "reduce_scatter"]
End = Literal["finish()", "zero_grad() after a backward pass", "zero_grad() without a backward pass"]
_OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_ENDS: tuple[End, ...] = get_args(End)
_ADVICE = (
    "every rank must run the same units in the same order. Skip a unit on all ranks or on none (draw from a generator"
    " with the same seed on each), or use stages 0 to 2: what a rank skips has gradient zero there"
)


class UnitOrder:
    """The operations that this rank runs, which it compares with those of the other ranks with the same parameters.

    each: whether ranks compare each operation before it begins. Otherwise they compare the operations of a whole step
    at its end: on GPUs the host would wait for each comparison (not measured yet). groups: the axes of the mesh
    of these ranks. describe: returns the name of a unit in messages, by its number. Collective.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], device: torch.device, describe: Callable[[int], str], *, each: bool
    ) -> None:
        self._groups, self._device, self._describe, self._each = groups, device, describe, each
        self._digest = 0
        self._ranks = self._gather(dist.get_rank())

    def begin(self, operation: Operation, unit: int) -> None:
        """Begin an operation of a unit. Raise PeerTimeout, and Disagreement on every rank if one runs another one."""
        self._run(unit * len(_OPERATIONS) + _OPERATIONS.index(operation))

    def end(self, end: End) -> None:
        """End a step. Raise PeerTimeout, and Disagreement on every rank if one runs or has run something else."""
        self._run(-1 - _ENDS.index(end))
        digest, self._digest = self._digest, 0
        if not self._each:  # also after a step like the one before: another rank may have run something else
            self._compare(digest)

    def _run(self, code: int) -> None:
        if self._each:
            self._compare(code)
        else:
            self._digest = zlib.crc32(b"%d," % code, self._digest)

    def _compare(self, number: int) -> None:
        numbers = self._gather(number)
        other = next((rank for rank, theirs in enumerate(numbers) if theirs != numbers[0]), 0)
        if other:
            ranks = [named(self._ranks[rank]) for rank in (0, other)]
            if self._each:
                texts = [f"{rank} runs {self._text(numbers[i])}" for rank, i in zip(ranks, (0, other), strict=True)]
                difference = ", ".join(texts)
            else:
                difference = f"{' and '.join(ranks)} have run other units in this step, or in another order"
            raise Disagreement(f"stage 3: {difference}: {_ADVICE}")

    def _gather(self, number: int) -> list[int]:
        gathered = torch.tensor([number], device=self._device)
        for group in self._groups:
            gathered = collectives.all_gather(gathered, group)
        numbers: list[int] = gathered.tolist()
        return numbers

    def _text(self, code: int) -> str:
        if code < 0:
            return _ENDS[-1 - code]
        unit, operation = divmod(code, len(_OPERATIONS))
        return f"{_OPERATIONS[operation]} of {self._describe(unit)}"
