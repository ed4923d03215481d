"""tpfuse: tensor-parallel layers whose matrix products and communication are one program."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from tpfuse import _layout as _layout

if TYPE_CHECKING:
    from tpfuse.comm.measurement import measuring as measuring
    from tpfuse.layers.explain import explain as explain

__version__ = "0.1.0"

# Without a workspace of a fixed size cuBLAS may give other bits in another run, and torch refuses to call it where
# deterministic algorithms are asked for. cuBLAS reads this when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


_EXPORTED = {"explain": "tpfuse.layers.explain", "measuring": "tpfuse.comm.measurement"}


def __getattr__(name: str) -> Any:
    """What users call by its short name, imported when it is first used: torch and triton take a second to import."""
    if name in _EXPORTED:
        return getattr(importlib.import_module(_EXPORTED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
