"""Packages that only some kinds of data need."""

import importlib
from typing import Any

from tpfuse.train.errors import UserError


def optional_package(name: str, needed: str) -> Any:
    """Return a package of the extra `data`. Raise UserError, which says what needs it, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{needed} needs the package {name}: pip install 'tpfuse[data]'") from None
