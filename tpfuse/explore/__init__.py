"""Run a protocol over symmetric memory under many schedules, and report accesses that no signal orders.

    from tpfuse.explore import explore

    def protocol(memory):                # runs on each rank; memory is a tpfuse.comm SymmetricMemory
        ...                              # launch kernels, signal, wait_signal, barrier, check the result

    def test_protocol():
        explore(protocol, world=3)       # raises RaceError, DeadlockError or ProtocolError, which says how to replay it
        explore_all(protocol, world=2)   # every execution, not a sample

The ranks run in one process under Triton's interpreter (TRITON_INTERPRET=1), one at a time. The schedule may switch to
another rank before every operation on symmetric memory, so a schedule and its seed reproduce a run exactly. Vector
clocks follow every release and acquire: two conflicting accesses that only the schedule has ordered are reported, in
either order.
"""

from tpfuse.explore.errors import DeadlockError as DeadlockError
from tpfuse.explore.errors import ExploreError as ExploreError
from tpfuse.explore.errors import ProtocolError as ProtocolError
from tpfuse.explore.errors import RaceError as RaceError
from tpfuse.explore.explorer import Report as Report
from tpfuse.explore.explorer import explore as explore
from tpfuse.explore.explorer import explore_all as explore_all
from tpfuse.explore.schedules import PCT as PCT
from tpfuse.explore.schedules import Decided as Decided
from tpfuse.explore.schedules import RoundRobin as RoundRobin
from tpfuse.explore.schedules import Schedule as Schedule
from tpfuse.explore.schedules import Sequential as Sequential
from tpfuse.explore.simulated_memory import SimulatedMemory as SimulatedMemory
from tpfuse.explore.torch_handle import TorchHandle as TorchHandle
