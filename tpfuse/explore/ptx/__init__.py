"""Execute compiled kernels on the CPU: the PTX that Triton makes for GPUs of compute capability 8.0 and 9.0.

    from tpfuse.explore.ptx import Kernel, compiled

    with compiled():
        kernel[(programs,)](x, out, n, BLOCK=128)             # a kernel of Triton; tensors on the CPU
    explore(protocol, world=2, launches=compiled)             # the same in an explored protocol

    kernel = Kernel(ptx, shared)                              # or the PTX of any kernel, with its parameters in order
    kernel.run((programs,), [x, out, n, None, None])

All threads of a program run at once, as NumPy arrays, and the programs of a grid one after another. A wrong access, a
missing barrier or an instruction that is not known raises a PtxError, which names the line of PTX and of the source.
"""

from tpfuse.explore.ptx.faults import Divergence as Divergence
from tpfuse.explore.ptx.faults import GlobalRace as GlobalRace
from tpfuse.explore.ptx.faults import MbarrierFault as MbarrierFault
from tpfuse.explore.ptx.faults import MemoryFault as MemoryFault
from tpfuse.explore.ptx.faults import PtxError as PtxError
from tpfuse.explore.ptx.faults import SharedRace as SharedRace
from tpfuse.explore.ptx.faults import Stuck as Stuck
from tpfuse.explore.ptx.faults import Unsupported as Unsupported
from tpfuse.explore.ptx.faults import WgmmaHazard as WgmmaHazard
from tpfuse.explore.ptx.kernel import Kernel as Kernel
from tpfuse.explore.ptx.launches import compiled as compiled
