"""Each operator's cases: what `tpfuse verify` compares with the reference, and what is compiled ahead of time.

A module of this folder is named as its operator and holds

    CASES: tuple[Case, ...]                 small comparisons
    launches(dtype: torch.dtype) -> None    calls the launchers on meta tensors, so that every row of the operator's
                                            configurations and every variant of its kernels is met
"""

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """The operators, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(operator: str) -> ModuleType:
    """An operator's module."""
    return importlib.import_module(f"{__name__}.{operator}")
