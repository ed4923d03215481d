"""A stand-in for the stream on which activations are copied to the host and back.

Faked: the copies, which are made on the CPU, as late as they may be. Real: the calls, their order, and which memory is
freed before them. Not covered: the speed, and whether a copy and a kernel run at the same time.
"""

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor


class CopyStandIn:
    """`tpfuse.parallel.offloaded_inputs.CopyStream` on a CPU, whose copies are made when something waits for them.

    Until then what a copy writes is NaN. It stays NaN if the memory that the copy reads has been freed by then, or if
    the copy was not put behind the work of the current stream. Tests read `log`.
    """

    def __init__(self, _: torch.device) -> None:
        self._copies: list[Callable[[], object]] = []
        self._made = 0
        self._follows = False
        self.log: list[str] = []

    def follow(self) -> None:
        self._follows = True

    def to_host(self, x: Tensor) -> Tensor:
        return self._copy(x, "to host")

    def to_device(self, host: Tensor) -> Tensor:
        return self._copy(host, "to device")

    def _copy(self, source: Tensor, what: str) -> Tensor:
        ends, follows = (ref(source), ref(target := torch.full_like(source, torch.nan))), self._follows

        def copy() -> None:
            source, target = (end() for end in ends)
            if follows and source is not None and target is not None:
                target.copy_(source)

        self._follows = False
        self._copies.append(copy)
        self.log.append(what)
        return target

    def record(self) -> int:
        return len(self._copies)

    def wait(self, event: int) -> None:
        with torch.no_grad():
            for copy in self._copies[self._made : event]:
                copy()
        self._made = max(self._made, event)
        self.log.append("wait")
