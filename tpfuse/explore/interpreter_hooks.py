"""Hooks into Triton's interpreter (3.6 to 3.9) that pass launches and memory operations of kernels to an explored run.

Triton patches `triton.language` at each launch and restores it at the end, which would disturb other ranks in the
middle of a launch: within `hooked()` it is patched once for all launches. Operations are still performed by the
interpreter's own code; only the launch is ours, because programs have to be started one by one. Everything is restored
at the end of the block.
"""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton._C.libtriton import ir
from triton.language import core
from triton.runtime import interpreter

from tpfuse.explore import inline_assembly
from tpfuse.explore.inline_assembly import refuse_thread_numbers
from tpfuse.explore.memory import Addresses, Semantics
from tpfuse.explore.run import ExploredRun

_BUILDER: Any = interpreter.interpreter_builder
_PLAIN: Any = interpreter.InterpreterBuilder
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_SCOPES = {ir.MEM_SYNC_SCOPE.CTA: 0, ir.MEM_SYNC_SCOPE.GPU: 1, ir.MEM_SYNC_SCOPE.SYSTEM: 2}


def _semantics(sem: Any, scope: Any, **more: bool) -> Semantics:
    return Semantics(acquires=sem in _ACQUIRES, releases=sem in _RELEASES, scope=_SCOPES[scope], **more)


def _addresses(pointers: Any, mask: Any = None) -> Addresses:
    refuse_thread_numbers(pointers.data)
    addresses: Addresses = np.asarray(pointers.data).ravel()
    return addresses if mask is None else addresses[_active(mask).ravel()]


def _active(mask: Any) -> NDArray[np.bool_]:
    """Return a mask as booleans: the interpreter holds the `&` of two masks as int8."""
    return np.asarray(mask.data).astype(bool)


def _values(pointers: Any, mask: Any = None) -> NDArray[Any]:
    """Return the values in memory at the active lanes."""
    dtype = interpreter._get_np_dtype(pointers.get_element_ty())
    active = np.ones(pointers.data.shape, bool) if mask is None else _active(mask)
    values = interpreter._interpreter.load(pointers.data, active, np.zeros(pointers.data.shape, dtype), dtype)
    return np.asarray(values).ravel()[active.ravel()]


class _Operations:
    """The operations of the interpreter's builder that touch memory, for one run."""

    def __init__(self, run: ExploredRun) -> None:
        self._run, self._memory, self._scheduler = run, run.memory, run.scheduler

    def create_masked_load(self, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        size = ptrs.get_element_ty().primitive_bitwidth // 8 or 1
        parts = self._memory.touched(_addresses(ptrs, mask))
        if not parts:
            value = _PLAIN.create_masked_load(_BUILDER, ptrs, mask, *args, **kwargs)
            self._memory.loaded(np.asarray(value.data))
            return value
        load = self._memory.access(parts, size, "load", write=False)
        volatile = (*args, *kwargs.values())[-1]  # the last parameter in every version of Triton
        with self._memory.reading(*([] if volatile else [(parts, size)])):
            value = _PLAIN.create_masked_load(_BUILDER, ptrs, mask, *args, **kwargs)
        if load is not None and ptrs.data.size == 1:
            self._memory.polled(load)
        return value

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_thread_numbers(value.data)
        size = ptrs.get_element_ty().primitive_bitwidth // 8 or 1
        parts = self._memory.touched(_addresses(ptrs, mask))
        if parts:
            self._memory.access(parts, size, "store", write=True)
        else:
            self._scheduler.acted(self._scheduler.current)
        result = _PLAIN.create_masked_store(_BUILDER, ptrs, value, mask, *args, **kwargs)
        self._memory.written(parts)
        return result

    def create_barrier(self) -> None:
        if self._scheduler.current.program is not None:
            inline_assembly.program_barrier(self._run)

    def create_inline_asm(
        self, text: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> inline_assembly.AssemblyResults:
        if pack != 1:
            raise ValueError(f"inline assembly with pack={pack}: the explorer supports pack=1")
        operands, grid = [value.data for value in values], vars(_BUILDER)["grid_dim"]
        return inline_assembly.execute(self._run, text, constraints, operands, types, grid)

    def _atomic(
        self,
        name: str,
        ptr: Any,
        mask: Any,
        semantics: Semantics,
        perform: Callable[[], Any],
        stored: Callable[[NDArray[Any]], NDArray[np.bool_]],
    ) -> Any:
        parts = self._memory.touched(_addresses(ptr, mask))
        if not parts:
            if semantics.writes:
                self._scheduler.acted(self._scheduler.current)
            result = perform()
            self._memory.loaded(np.asarray(getattr(result, "data", ())))
            return result
        if sum(part.size for _, part in parts) != _addresses(ptr, mask).size:
            raise ValueError("an atomic operation accesses symmetric memory and other memory: expected one of them")

        def watched() -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
            old = _values(ptr, mask)
            result = perform()
            return result, old, _values(ptr, mask), stored(old)

        return self._memory.atomic(name, parts, semantics, watched)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        perform = lambda: _PLAIN.create_atomic_rmw(_BUILDER, op, ptr, val, mask, sem, scope)  # noqa: E731
        name = f"atomic_{op.name.lower().removeprefix('f').removeprefix('u')}"
        refuse_thread_numbers(val.data)
        return self._atomic(name, ptr, mask, _semantics(sem, scope), perform, lambda old: np.ones(old.shape, bool))

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        perform = lambda: _PLAIN.create_atomic_cas(_BUILDER, ptr, cmp, val, sem, scope)  # noqa: E731
        expected = np.asarray(cmp.data).ravel()
        return self._atomic("atomic_cas", ptr, None, _semantics(sem, scope), perform, lambda old: old == expected)

    # Triton 3.9

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        semantics = _semantics(sem, scope, modifies=False, writes=False)
        perform = lambda: _PLAIN.create_masked_load(_BUILDER, ptr, mask, None, None, True)  # noqa: E731
        return self._atomic("atomic_load", ptr, mask, semantics, perform, lambda old: np.zeros(old.shape, bool))

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        semantics = _semantics(sem, scope, modifies=False)
        perform = lambda: _PLAIN.create_masked_store(_BUILDER, ptr, val, mask, None)  # noqa: E731
        return self._atomic("atomic_store", ptr, mask, semantics, perform, lambda old: np.ones(old.shape, bool))

    def create_atomic_poll(self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
        """Wait until each word has its value; a time-out ends the wait once all other ranks wait too."""
        semantics, matched = _semantics(sem, scope, modifies=False, writes=False), np.zeros(ptr.data.shape, bool)
        for lane in np.ndindex(ptr.data.shape):
            word = interpreter.TensorHandle(np.atleast_1d(ptr.data[lane]), ptr.dtype)
            wanted = np.broadcast_to(expected.data, ptr.data.shape)[lane]
            self._scheduler.current.woken = False
            if not self._memory.touched(_addresses(word)):
                raise ValueError("tl.atomic_poll on other memory: the explorer supports it on symmetric memory only")
            while not matched[lane] and not (timeout_ns is not None and self._scheduler.current.woken):
                read = lambda word=word: _values(word)  # noqa: E731
                value = self._atomic("atomic_poll", word, None, semantics, read, lambda old: np.zeros(old.shape, bool))
                matched[lane] = value[0] == wanted
        return interpreter.TensorHandle(matched, tl.int1)


def _launch(run: ExploredRun, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    named = _bind(executor.fn, args, kwargs)
    named = {name: v if name in executor.constexprs else interpreter._implicit_cvt(v) for name, v in named.items()}
    grid = executor.grid(named) if callable(executor.grid) else executor.grid
    grid = (*grid, 1, 1)[:3]

    threads = 32 * kwargs.get("num_warps", 4)
    tensors = [
        (number, x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes())
        for number, x in enumerate((*args, *kwargs.values()))
        if isinstance(x, Tensor)
    ]

    def begin(index: tuple[int, ...]) -> None:
        run.scheduler.current.threads, run.scheduler.current.some_threads = threads, False
        run.scheduler.current.tensors = tensors
        _BUILDER.set_grid_dim(*grid)
        _BUILDER.set_grid_idx(*index)

    def kernel(kept: object = (args, kwargs)) -> object:  # a graph keeps the tensors
        return executor.fn(**named)

    run.launch(grid, begin, kernel)


def _bind(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name, of the keywords only those that the function takes (not num_warps)."""
    spec = inspect.getfullargspec(function)
    known = {key: value for key, value in kwargs.items() if key in spec.args or key in spec.kwonlyargs}
    return inspect.getcallargs(function, *args, **known)


@contextlib.contextmanager
def hooked() -> Iterator[Callable[[ExploredRun], None]]:
    """Patch the interpreter within the block; yield a function that sets the run to which operations belong."""
    names = [name for name in vars(_Operations) if name.startswith("create_") and hasattr(_PLAIN, name)]
    before = dict(vars(_BUILDER))
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    scope = patch(types.SimpleNamespace(__globals__={"tl": tl, "core": core}))
    current: list[ExploredRun] = []

    def enter(run: ExploredRun) -> None:
        current[:] = [run]
        operations = _Operations(run)
        vars(_BUILDER).update({name: getattr(operations, name) for name in names})
        run.scheduler.save = lambda: {name: vars(_BUILDER).get(name) for name in ("grid_dim", "grid_idx")}
        run.scheduler.restore = vars(_BUILDER).update

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        _launch(current[0], executor, args, kwargs)

    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter.GridExecutor.__call__ = launch
    try:
        yield enter
    finally:
        vars(_BUILDER).clear()
        vars(_BUILDER).update(before)
        interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, call
        scope.restore()
