"""The descriptions of the operators: module NAME of this folder holds OPERATOR, a `tpfuse.tools.operator.Operator`."""

import importlib
import pkgutil

from tpfuse.tools.operator import Operator


def names() -> list[str]:
    """Return the names of the operators in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(operator: str) -> Operator:
    """Return the description of an operator."""
    description: Operator = importlib.import_module(f"{__name__}.{operator}").OPERATOR
    return description
