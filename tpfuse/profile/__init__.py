"""Profiles: ranks record what they do, and `tpfuse profile` runs profilers and explains what they have recorded."""

from typing import TYPE_CHECKING

from tpfuse._lazy import lazy_names

_MODULES = {"record": "tpfuse.trace.recording"}
__all__ = [*_MODULES]

if TYPE_CHECKING:
    from tpfuse.trace.recording import record as record
else:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
