"""The steps of a run as text: a column for each rank, time downward."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from tpfuse.explore.sites import Site, text_of

_WIDTH = 100  # characters, of all columns
_MOST = 24  # lines


def picture(steps: Sequence[Site], message: str = "") -> str:
    """Return the last steps of a run, such as an error's `steps`: a step that is repeated at once is shown once.

    message: of the error; the steps that it names are marked with an arrow. The allocation of buffers is left out.
    """
    shown = [step for step, _ in itertools.groupby(steps) if not step.operation.startswith('barrier "buffer ')]
    ranks = sorted({step.rank for step in shown})
    width = max(_WIDTH // max(len(ranks), 1) - 3, 12)
    lines = [" | ".join(f"rank {rank}".ljust(width) for rank in ranks)]
    if len(shown) > _MOST:
        lines.append(f"… {len(shown) - _MOST} earlier steps")
    for step in shown[-_MOST:]:
        mark = "→ " if message and str(step) in message else "  "
        program = "" if step.program is None else f" {step.program[0]}"
        file, line = step.lines[0]
        _, _, code = text_of(step.lines[0]).partition(": ")
        cell = f"{mark}{step.operation}{program}  {Path(file).name.removesuffix('.py')}:{line} {code}"
        cells = [(cell if rank == step.rank else "")[:width].ljust(width) for rank in ranks]
        lines.append(" | ".join(cells))
    return "\n".join(line.rstrip() for line in lines)
