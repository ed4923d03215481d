"""Explores the schedules of a protocol over symmetric memory, and finds what they do not order.

    from tpfuse.testing.explore import explore

    def protocol(memory):                # on each rank; memory is a tpfuse.comm SymmetricMemory
        ...                              # launch kernels, put, wait, barrier, check the result

    def test_protocol():
        explore(protocol, world=3)       # RaceError, DeadlockError or ProtocolError, with what replays it

The ranks run in one process under Triton's interpreter (TRITON_INTERPRET=1), one at a time, and may change places
before every operation on symmetric memory; so a schedule and its seed reproduce a run exactly. Vector clocks follow
every release and acquire: two accesses that only luck has ordered are reported in whichever order they happened.
"""

from tpfuse.testing.explore.errors import DeadlockError, ExploreError, ProtocolError, RaceError
from tpfuse.testing.explore.explorer import Report, explore, explore_bounded
from tpfuse.testing.explore.schedules import PCT, Choices, RandomWalk, RoundRobin, Schedule, Sequential
from tpfuse.testing.explore.simulated_memory import SimulatedMemory

__all__ = [
    "PCT",
    "Choices",
    "DeadlockError",
    "ExploreError",
    "ProtocolError",
    "RaceError",
    "RandomWalk",
    "Report",
    "RoundRobin",
    "Schedule",
    "Sequential",
    "SimulatedMemory",
    "explore",
    "explore_bounded",
]
