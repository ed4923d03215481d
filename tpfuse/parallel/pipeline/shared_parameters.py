"""Parameters that stages of a pipeline share, as an engine of `tpfuse.zero` must know them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SharedParameters:
    """The parameters of this rank that several stages use."""

    # Names of those that several stages of this rank use, with the number of these stages. The gradient of such a
    # parameter arrives once for each stage and backward pass.
    uses: Mapping[str, int] = field(default_factory=dict)
    tied: Sequence[str] = ()  # names of those that the first and the last stage share, on ranks that have one of both
    # On all ranks alike: the ranks along "pp" of the first and the last stage if they share parameters, else None.
    ends: tuple[int, int] | None = None
