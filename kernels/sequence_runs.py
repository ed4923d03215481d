"""sequence_runs: which positions of a sequence each rank of a ring holds, as kernels count them.

Each rank has `count` concatenated runs of `size` tokens; token i of run j of rank r has the position start(r, j) + i
step, where start is unit r for the first run and unit (2 world - 1 - r) for the second. So one formula covers all ways
of spreading a sequence:

| balance    | count | size         | unit         | step  | rank r holds                        |
|------------|-------|--------------|--------------|-------|-------------------------------------|
| zigzag     | 2     | T / 2 world  | T / 2 world  | 1     | chunks r and 2 world - 1 - r        |
| contiguous | 1     | T / world    | T / world    | 1     | chunk r                             |
| striped    | 1     | T / world    | 1            | world | r, r + world, …                     |

Positions increase along a run, and from the first run to the second. Where a sequence is padded, the positions from
`length` on are padding. Zigzag is the balance of Llama 3 (arXiv:2407.21783, section 3.3.2); striped is that of
arXiv:2311.09431.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class SequenceRuns:
    """The positions of a sequence of `length` tokens on `world` ranks; the module describes the other fields."""

    length: int
    world: int
    count: int
    size: int
    unit: int
    step: int

    @property
    def local_length(self) -> int:
        """Return the number of tokens of each rank, padding included."""
        return self.count * self.size

    def start(self, rank: int, run: int) -> int:
        """Return the position of a run's first token."""
        return self.unit * (rank if run == 0 else 2 * self.world - 1 - rank)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a rank's tokens, [local_length] int64, in increasing order."""
        offsets = torch.arange(self.size, device=device) * self.step
        return torch.cat([self.start(rank, run) + offsets for run in range(self.count)])


@triton.jit
def run_start(rank, run, unit, WORLD: tl.constexpr):
    """Return `SequenceRuns.start` on the device."""
    return unit * tl.where(run == 0, rank, 2 * WORLD - 1 - rank)
