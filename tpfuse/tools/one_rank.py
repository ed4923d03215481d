"""Run one rank of a communicating operator alone on a device, with all signals set in advance, for a profiler.

    ncu --profile-from-start off --set full python -m tpfuse.tools.one_rank all_gather_gemm --world 8 --rows 1024

Nsight Compute runs each kernel many times and alone; a kernel that waits for a peer would wait for ever. Here the flags
say that every other rank is a thousand launches ahead, so that no launch waits. The epochs are in memory that the
profiler restores before each replay. The data of the peers are zeros and are read from this device, not over a link:
the figures of copies are those of local memory.
"""

import argparse
import sys
from dataclasses import fields, replace
from typing import Any

import torch

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.testing.one_process import OneProcess, OneProcessMemory
from tpfuse.tools.rank_programs import PROGRAMS, TINY, RankProgram, Sizes, load

_NUMBERS = [field.name for field in fields(Sizes) if field.name != "dtype"]


def profile(name: str, world: int, rank: int, sizes: Sizes, device: torch.device, timeout: float) -> None:
    """Run a program of PROGRAMS once as `rank` of `world`, between the marks at which a profiler starts and stops.

    Raise PeerTimeout if a kernel still waits after `timeout` seconds.
    """
    ranks = OneProcess(world, device, timeout, shared=False)
    with ranks.aborted():
        program = ranks.alone(rank, lambda memory: load(memory, name, sizes))
    ranks.signal_ahead(rank)
    ranks.alone(rank, lambda memory: _marked(program, memory))


def _marked(program: RankProgram, memory: OneProcessMemory) -> None:
    if memory.device.type != "cuda":
        program.run(0)
        return
    torch.cuda.synchronize(memory.device)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    program.run(0)
    torch.cuda.synchronize(memory.device)
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tpfuse.tools.one_rank")
    parser.add_argument(
        "program", choices=PROGRAMS, metavar="PROGRAM", help=f"run this program, one of: {'; '.join(PROGRAMS)}"
    )
    parser.add_argument("--world", type=int, default=8, help="number of ranks of the group (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="run as this rank (default: %(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="longest run in seconds, with the profiler's replays (default: %(default)s)",
    )
    for name in _NUMBERS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{name.replace('_', ' ')} of one rank"
        )
    arguments = parser.parse_args()
    if not 0 <= arguments.rank < arguments.world:
        parser.error(f"rank {arguments.rank} of {arguments.world}: expected 0 <= rank < world")
    return arguments


def main() -> int:
    """Run on a GPU, or interpreted with tiny shapes if TRITON_INTERPRET=1 is set. Return the exit status.

    It is 1 if a kernel waits, 2 without a GPU unless kernels are interpreted, else 0.
    """
    arguments = _arguments()
    if not INTERPRETED and not torch.cuda.is_available():
        print("tpfuse.tools.one_rank: error: there is no CUDA GPU, and TRITON_INTERPRET=1 is not set", file=sys.stderr)
        return 2
    given: dict[str, Any] = {name: getattr(arguments, name) for name in _NUMBERS if getattr(arguments, name)}
    sizes = replace(TINY if INTERPRETED else Sizes(), **given)
    device = torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())
    try:
        profile(arguments.program, arguments.world, arguments.rank, sizes, device, arguments.timeout)
    except PeerTimeout as error:
        print(f"tpfuse.tools.one_rank: error: {arguments.program}: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.program}: rank {arguments.rank} of {arguments.world}, once, on {device}: nothing has waited")
    return 0


if __name__ == "__main__":
    sys.exit(main())
