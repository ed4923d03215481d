"""The choice of what attends to the keys of a group's ranks."""

import torch.distributed as dist

from tpfuse.comm.dispatch import Choice, Implementations
from tpfuse.ops.ring_attention.collective import CollectiveRing
from tpfuse.ops.ring_attention.direct import DirectRing
from tpfuse.ops.ring_attention.fused import FusedRing
from tpfuse.ops.ring_attention.ring import Ring

_IMPLEMENTATIONS: Implementations[Ring] = Implementations(CollectiveRing, direct=DirectRing, fused=FusedRing)


def ring_of(choice: Choice, group: dist.ProcessGroup) -> Ring:
    """Return what serves the group by a choice. The first call for a group and a choice is collective."""
    return _IMPLEMENTATIONS.of(choice, group)
