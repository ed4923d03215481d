"""The spans of a rank as NVTX ranges, which Nsight Systems shows beside the kernels of the GPU."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tpfuse.comm.trace import Kind, Span, observed
from tpfuse.errors import optional_package

DOMAIN = "tpfuse"

_COLOURS: dict[Kind, int] = {  # alpha, red, green, blue
    "step": 0xFF404040,
    "micro_batch": 0xFF808080,
    "phase": 0xFF4477AA,
    "layer": 0xFF66CCEE,
    "operator": 0xFF228833,
    "communication": 0xFFCCBB44,
    "wait": 0xFFEE6677,
}


def nvtx_package() -> Any:
    """Return the package nvtx. Raise UserError if it is not installed."""
    return optional_package("nvtx", "--profile.nvtx", "profile")


class NvtxRanges:
    """An observer that shows spans as ranges of the NVTX domain tpfuse. Their category is the kind of the span.

    A range of a layer is one of the process, and every other range is one of the thread that marks it, because in
    CUDA's backward pass a layer can begin in one thread and end in another.
    """

    def __init__(self) -> None:
        self._domain = nvtx_package().get_domain(DOMAIN)
        self._attributes: dict[tuple[Kind, str], Any] = {}
        self._layers: dict[Span, Any] = {}  # the range of each layer that has not ended

    @contextlib.contextmanager
    def shown(self, rank: int, world: int, layout: Mapping[str, Any]) -> Iterator[None]:
        """Show the spans within the block, in a range of the process that names the rank and the layout."""
        ranks = " x ".join(f"{name} {layout[name]}" for name in ("tp", "cp", "dp"))
        place = self._domain.get_event_attributes(f"rank {rank} of {world}: {ranks}", category="rank")
        whole = self._domain.start_range(place)
        try:
            with observed(self):
                yield
        finally:
            self._domain.end_range(whole)

    def begin(self, span: Span) -> None:
        """Begin the range of a span."""
        key = span.kind, _message(span)
        attributes = self._attributes.get(key)
        if attributes is None:
            attributes = self._domain.get_event_attributes(key[1], color=_COLOURS[span.kind], category=span.kind)
            self._attributes[key] = attributes
        if span.kind == "layer":
            self._layers[span] = self._domain.start_range(attributes)
        else:
            self._domain.push_range(attributes)

    def end(self, span: Span) -> None:
        """End the range of a span."""
        if span.kind == "layer":
            self._domain.end_range(self._layers.pop(span))
        else:
            self._domain.pop_range()

    def signal(self, flow: str) -> None:
        """Show nothing."""


def _message(span: Span) -> str:
    """Return the text of a span's range, without dtype and shapes, so that there are few different texts."""
    text = span.name.partition(" torch.")[0]
    if span.kind == "operator":
        return f"{text} ({span.implementation})" + (f" in {span.layer}" if span.layer else "")
    return text if span.peer is None else f"{text}, waits for rank {span.peer}"
