"""The descriptions of the operators. Module NAME of this folder defines OPERATOR (`tpfuse.tools.operator.Operator`)."""

import importlib
import pkgutil

from tpfuse.tools.operator import Operator, Trial


def names() -> list[str]:
    """Return the names of the operators in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(operator: str) -> Operator:
    """Return the description of an operator."""
    description: Operator = importlib.import_module(f"{__name__}.{operator}").OPERATOR
    return description


def trials() -> list[Trial]:
    """Return the trials that the tuner measures: those of all operators at shapes of models."""
    return [Trial(shape, mode) for name in names() for shape in load(name).models for mode in shape.launchers()]


def tiny_trials() -> list[Trial]:
    """Return trials of every kind that are small enough for the interpreter."""
    return [Trial(shape, mode) for name in names() for shape in load(name).tiny for mode in shape.launchers()]
