"""tpfuse: tensor-parallel layers whose matrix products and communication are one program."""

import importlib
from typing import TYPE_CHECKING, Any

from tpfuse import _layout as _layout

if TYPE_CHECKING:
    from tpfuse.layers.explain import explain as explain

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`tpfuse.explain`, imported when it is first used: torch and triton take a second, and their own settings."""
    if name == "explain":
        return importlib.import_module("tpfuse.layers.explain").explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
