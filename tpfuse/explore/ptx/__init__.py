"""Execute compiled kernels on the CPU: the PTX that Triton makes for GPUs of compute capability 8.0 and 9.0.

    from tpfuse.explore.ptx import Kernel

    compiled = triton.compile(...)                            # needs no GPU
    kernel = Kernel(compiled.asm["ptx"], compiled.metadata.shared)
    kernel.run((programs,), [x, out, n, None, None])          # tensors on the CPU, in the order of the parameters

All threads of a program run at once, as NumPy arrays, and the programs of a grid one after another. A wrong access, a
missing barrier or an instruction that is not known raises a PtxError, which names the line of PTX and of the source.
"""

from tpfuse.explore.ptx.faults import (
    Divergence,
    GlobalRace,
    MbarrierFault,
    MemoryFault,
    PtxError,
    SharedRace,
    Stuck,
    Unsupported,
    WgmmaHazard,
)
from tpfuse.explore.ptx.kernel import Kernel

__all__ = [
    "Divergence",
    "GlobalRace",
    "Kernel",
    "MbarrierFault",
    "MemoryFault",
    "PtxError",
    "SharedRace",
    "Stuck",
    "Unsupported",
    "WgmmaHazard",
]
