"""Resolves `tpfuse.kernels` and `tpfuse.models` in a source checkout.

Both folders are at the repository's root, where people look for them, but they must not be importable under their bare
names (Hugging Face publishes a package `kernels`). An installed tpfuse has them as ordinary subpackages. In a checkout
on PYTHONPATH this finder maps the two names, and no others, to the folders.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = {"tpfuse.kernels": _ROOT / "kernels", "tpfuse.models": _ROOT / "models"}


class _CheckoutFinder:
    """A finder for sys.meta_path. It has no base class: importing `importlib.abc` takes longer than all the rest."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        folder = _FOLDERS.get(fullname)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "kernels").is_dir():
    sys.meta_path.append(_CheckoutFinder())
