"""The choice of the collectives of a group.

| implementation | what it is                                                           |
|----------------|----------------------------------------------------------------------|
| direct         | torch operations on shared memory (`tpfuse.comm.collectives.direct`) |
| fused          | Triton kernels on symmetric memory (`tpfuse.comm.collectives.fused`) |
| collective     | NCCL, Gloo (`tpfuse.comm.collectives.collective`)                    |
"""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.collectives.collective import TorchCollectives
from tpfuse.comm.collectives.direct import DirectCollectives
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.dispatch import Choice, Implementations, choose_implementation

Collectives = DirectCollectives | FusedCollectives | TorchCollectives
_IMPLEMENTATIONS: Implementations[Collectives] = Implementations(
    TorchCollectives, direct=DirectCollectives, fused=FusedCollectives
)


def collectives_of(x: Tensor, group: dist.ProcessGroup, *, kernels: bool = True) -> Collectives:
    """Return what serves x's device and dtype. kernels: whether there is a kernel for the collective.

    Without one, CPU ranks of one host use shared memory, even if kernels were chosen.
    """
    choice = choose_implementation(x.device, x.dtype, group)
    if choice.implementation == "fused" and not kernels:
        on_cpu = x.device.type == "cpu"
        choice = replace(choice, implementation="direct") if on_cpu else Choice("collective", "no kernel")
    return _IMPLEMENTATIONS.of(choice, group)
