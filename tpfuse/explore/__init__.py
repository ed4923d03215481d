"""Run a protocol over symmetric memory under many schedules, and report accesses that no signal orders.

    from tpfuse.explore import explore

    def protocol(memory):                # runs on each rank; memory is a tpfuse.comm SymmetricMemory
        ...                              # launch kernels, signal, wait_signal, barrier, check the result

    def test_protocol():
        explore(protocol, world=3)       # raises RaceError, DeadlockError or ProtocolError, which says how to replay it

The ranks run in one process under Triton's interpreter (TRITON_INTERPRET=1), one at a time. The schedule may switch to
another rank before every operation on symmetric memory, so a schedule and its seed reproduce a run exactly. Vector
clocks follow every release and acquire: two conflicting accesses that only the schedule has ordered are reported, in
either order.
"""

from tpfuse.explore.errors import DeadlockError, ExploreError, ProtocolError, RaceError
from tpfuse.explore.explorer import Report, explore, explore_bounded
from tpfuse.explore.schedules import PCT, Choices, RoundRobin, Schedule, Sequential
from tpfuse.explore.simulated_memory import SimulatedMemory
from tpfuse.explore.torch_handle import TorchHandle

__all__ = [
    "PCT",
    "Choices",
    "DeadlockError",
    "ExploreError",
    "ProtocolError",
    "RaceError",
    "Report",
    "RoundRobin",
    "Schedule",
    "Sequential",
    "SimulatedMemory",
    "TorchHandle",
    "explore",
    "explore_bounded",
]
