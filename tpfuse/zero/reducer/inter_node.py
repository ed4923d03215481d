"""The reduction between nodes: each rank sums its node's sums with the ranks at its position on the other nodes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tpfuse.comm.collectives import collective
from tpfuse.comm.sum_order import Sum
from tpfuse.comm.traffic import Traffic

Spans = Sequence[tuple[int, int, int]]
"""Matrices, or whole rows of them, in a flat tensor: (first element, rows, columns) of each."""


class Compression(ABC):
    """A reduction that sends fewer bytes than the gradients have, without a state (`tpfuse.zero.compression`)."""

    @abstractmethod
    def all_reduce(self, x: Tensor, index: int, spans: Spans, group: ProcessGroup, traffic: Traffic) -> None:
        """Replace x [m] float32, of bucket `index`, by its sum over the group. Raise PeerTimeout."""

    def reduce_scatter(self, x: Tensor, index: int, spans: Spans, group: ProcessGroup, traffic: Traffic) -> Tensor:
        """Return this rank's shard of that sum, [m / world]; x may be overwritten."""
        self.all_reduce(x, index, spans, group, traffic)
        return x.view(group.size(), -1)[group.rank()]

    def keep_pending(self) -> None:  # noqa: B027 - only PowerSGD keeps remainders
        """Keep what the sums since the last call have left out: an update has used them."""

    def drop_pending(self) -> None:  # noqa: B027 - only PowerSGD keeps remainders
        """Forget what the sums since the last `keep_pending` have left out: they are discarded."""

    def scale_errors(self, factor: float) -> None:  # noqa: B027 - only PowerSGD keeps remainders
        """Multiply the remainders of earlier gradients by `factor`, because later gradients are multiplied by it."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that this rank keeps from one step to the next."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from the result of `state_dict` on this rank. Raise ValueError for a state of another kind."""
        if state:
            raise ValueError("the state is PowerSGD's: expected the empty state of compression in bfloat16")


class InterNodeReducer:
    """Sums over nodes. group: the ranks with this rank's position on every node, ordered by node.

    first_bucket: the number by which the compression knows bucket 0. total: the order of sums; None for that of the
    backend.
    """

    def __init__(
        self,
        group: ProcessGroup,
        compression: Compression | None = None,
        first_bucket: int = 0,
        total: Sum | None = None,
    ) -> None:
        self.group, self.compression, self._first, self._total = group, compression, first_bucket, total
        self.node, self.nodes = group.rank(), group.size()

    def all_reduce(self, x: Tensor, index: int, spans: Spans, traffic: Traffic) -> None:
        """Replace x [n] by its sum over the nodes, added from node 0 on."""
        if self.compression is not None:
            self.compression.all_reduce(x, self._first + index, spans, self.group, traffic)
        else:
            self.all_gather(self.reduce_scatter(x, index, spans, traffic), x, traffic)

    def reduce_scatter(self, x: Tensor, index: int, spans: Spans, traffic: Traffic) -> Tensor:
        """Return this node's shard, [n / nodes], of the sum of x [n] over the nodes; x may be overwritten."""
        if self.compression is not None:
            return self.compression.reduce_scatter(x, self._first + index, spans, self.group, traffic)
        rows = x.view(self.nodes, -1)
        out = rows[0].new_empty(rows.shape[1])
        collective.start_reduce_scatter(rows, out, self.group, self._total).wait()
        traffic.exchange((self.nodes - 1) * out.nbytes)
        return out

    def all_gather(self, part: Tensor, out: Tensor, traffic: Traffic) -> None:
        """Write all nodes' shards, [n / nodes] each, to out [n] in the order of nodes."""
        collective.start_all_gather(part.clone(), out.view(self.nodes, -1), self.group).wait()
        traffic.exchange((self.nodes - 1) * part.nbytes)
