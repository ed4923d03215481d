"""Copies of modules, some from changed source, executed beside the imported ones; the copies import each other."""

import importlib.util
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from triton.runtime import interpreter

_MARK = " (copy)"


def original_file(file: str) -> str:
    """Return the file from which a copy was made."""
    return file.removesuffix(_MARK)


class _FreshLoader(Loader, MetaPathFinder):
    """Finds and executes the copies, in any order in which they import one another."""

    def __init__(self, sources: Mapping[str, tuple[str, str]]) -> None:
        self._sources = sources  # name -> (file, source)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self._sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self._sources[fullname][0])

    def exec_module(self, module: ModuleType) -> None:
        file, source = self._sources[module.__name__]
        module.__file__ = file
        # Readers of source by file name (tracebacks, triton.jit) get this copy; an entry without a time stamp is kept.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), module.__dict__)


@contextmanager
def fresh(modules: Sequence[ModuleType], sources: Mapping[str, str] | None = None) -> Iterator[list[ModuleType]]:
    """Yield copies of the modules, executed again, with the source in `sources` for the names in it.

    Within the block `import` finds the copies; after it the originals again.
    """
    names = [module.__name__ for module in modules]
    texts = {
        name: (f"{inspect.getsourcefile(module)}{_MARK}", (sources or {}).get(name) or inspect.getsource(module))
        for name, module in zip(names, modules, strict=True)
    }
    finder = _FreshLoader(texts)
    parents = [(sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    attributes = [(parent, child, getattr(parent, child)) for parent, child in parents if hasattr(parent, child)]
    originals = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for parent, child, _ in attributes:
        delattr(parent, child)  # `from package import module` looks there first
    sys.meta_path.insert(0, finder)
    copies: list[ModuleType] = []
    try:
        for name in names:
            copies.append(sys.modules.get(name) or _load(name, finder))
        yield copies
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(originals)
        for parent, child in parents:
            if parent is not None and hasattr(parent, child):
                delattr(parent, child)
        for parent, child, module in attributes:
            setattr(parent, child, module)
        files = {file for file, _ in texts.values()}
        for file in files:
            linecache.cache.pop(file, None)
        rewritten = interpreter.InterpretedFunction.rewritten_fn
        for function in [function for function in rewritten if function.__code__.co_filename in files]:
            del rewritten[function]


def _load(name: str, finder: _FreshLoader) -> ModuleType:
    """Import a copy whose package may not be importable by its name (a test's module)."""
    spec = finder.find_spec(name, None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    finder.exec_module(module)
    parent = sys.modules.get(name.rpartition(".")[0])
    if parent is not None:
        setattr(parent, name.rpartition(".")[2], module)
    return module
