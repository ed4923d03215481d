"""Lazy public names (PEP 562): a package imports each when it is first used, since torch and Triton take seconds."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose public names are defined in other modules.

    modules: for each public name the module that defines it, or the module that it is. After its first use a name is an
    attribute of the package.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = importlib.import_module(modules[name])
        if modules[name] != f"{package}.{name}":
            value = getattr(value, name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *modules})

    return get, names
