"""The whole gradients of a unit of stage 3 in a step with virtual ranks, until the unit is reduced."""

from collections.abc import Collection

import torch
from torch import Tensor

from tpfuse.comm.layout import local_tensor
from tpfuse.comm.sum_order import TreeSums, VirtualRanks, summed_dtype
from tpfuse.zero.parameter_takeover import local_gradient
from tpfuse.zero.sharded_units import Unit


class WholeGradients:
    """Sums of the gradients of a unit over this rank's virtual ranks (`tpfuse.comm.sum_order`).

    twice: the parameters with two uses in a pass, as embedding and as head, which are summed apart.
    """

    def __init__(self, unit: Unit, virtual: VirtualRanks, twice: Collection[str]) -> None:
        gathered = self._gathered = {name: unit.gathered[name] for name in unit.trained}
        self._twice = [name for name in gathered if name in twice]
        places = [(name, 0) for name in gathered] + [(name, 1) for name in self._twice]
        self._index = {place: index for index, place in enumerate(places)}
        like = [gathered[name] for name, _ in places]
        self._wholes = [torch.zeros_like(x, dtype=summed_dtype(x.dtype)) for x in like]
        first = [local_tensor(x) for x in self._wholes]
        deeper = [[torch.zeros_like(x) for x in first] for _ in range(virtual.here.bit_length() - 1)]
        self._sums = TreeSums([first, *deeper], virtual.here)

    def take(self, leaf: int, *, as_head: bool) -> None:
        """Take the gradients that a pass has left in `.grad`. as_head: whether its stage is the last of a pipeline."""
        for name, parameter in self._gathered.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                use = int(as_head and name in self._twice)
                self._sums.add(self._index[name, use], local_gradient(gradient, parameter), leaf)

    def take_of_head(self, name: str, gradient: Tensor, leaf: int) -> None:
        """Take the gradient of a parameter's use as head."""
        self._sums.add(self._index[name, 1], gradient, leaf)

    def close(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums by name, as the gathered parameters are, and this rank's parts of those of heads."""
        self._sums.close()
        first = {name: self._wholes[self._index[name, 0]] for name in self._gathered}
        return first, {name: local_tensor(self._wholes[self._index[name, 1]]) for name in self._twice}
