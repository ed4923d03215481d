"""The inter_node between nodes: what a node's ranks have summed passes to the ranks in the same place on the other nodes.

Only the shard of a rank crosses, once each way: its sums by a reduce-scatter, its new parameters by an all-gather.
"""

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.collectives import collective
from tpfuse.comm.traffic import Traffic


class Compression(Protocol):
    """Sums that travel in fewer bytes (`tpfuse.zero.compression`)."""

    def all_reduce(
        self,
        x: Tensor,
        index: int,
        matrices: tuple[tuple[int, int, int], ...],
        group: dist.ProcessGroup,
        traffic: Traffic,
    ) -> None:
        """x [m] float32 becomes its sum over the group, of bucket `index`; pieces: (first, rows, columns) of the
        matrices that lie in x whole, or at least in whole rows."""

    def reduce_scatter(
        self,
        x: Tensor,
        index: int,
        matrices: tuple[tuple[int, int, int], ...],
        group: dist.ProcessGroup,
        traffic: Traffic,
    ) -> Tensor:
        """This rank's part of that sum, [m / world]; x may be overwritten."""

    def scale_errors(self, factor: float) -> None:
        """Gradients are multiplied by `factor` from now on: so is what is left of earlier ones."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What this rank keeps from one step to the next."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from what `state_dict` returned on this rank. Raises ValueError where it is of another kind."""


class InterNodeReducer:
    """group: the ranks in this rank's place on all nodes; its numbers are the nodes'."""

    def __init__(self, group: dist.ProcessGroup, compression: Compression | None = None) -> None:
        self.group, self.compression = group, compression
        self.node, self.nodes = group.rank(), group.size()

    def all_reduce(self, x: Tensor, index: int, matrices: tuple[tuple[int, int, int], ...], traffic: Traffic) -> None:
        """x [n] becomes its sum over the nodes, node 0 first."""
        if self.compression is not None:
            self.compression.all_reduce(x, index, matrices, self.group, traffic)
            return
        part = self.reduce_scatter(x, index, matrices, traffic)
        self.all_gather(part, x, traffic)

    def reduce_scatter(
        self, x: Tensor, index: int, matrices: tuple[tuple[int, int, int], ...], traffic: Traffic
    ) -> Tensor:
        """This node's part of the sum of x [n] over the nodes; x may be overwritten."""
        if self.compression is not None:
            return self.compression.reduce_scatter(x, index, matrices, self.group, traffic)
        rows = x.view(self.nodes, -1)
        out = rows[0].new_empty(rows.shape[1])
        collective.start_reduce_scatter(rows, out, self.group).wait()
        traffic.exchange((self.nodes - 1) * out.nbytes)
        return out

    def all_gather(self, part: Tensor, out: Tensor, traffic: Traffic) -> None:
        """out [n] becomes all nodes' parts, [n / nodes] each."""
        collective.start_all_gather(part.clone(), out.view(self.nodes, -1), self.group).wait()
        traffic.exchange((self.nodes - 1) * part.nbytes)
