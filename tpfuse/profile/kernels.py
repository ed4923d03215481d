"""Which of tpfuse's kernels wait for other ranks, as their sources say, and which programs run those alone.

Nothing here imports torch or Triton: the sources are parsed, not run. So the answer is always that of the kernels that
are installed.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_WAIT = "wait_signal"  # of tpfuse.kernels.signals: every wait in a kernel is a call of it
_Function = tuple[str, str]  # (module, name)

# A program of `python -m tpfuse.tools.one_rank` that launches the kernel, for each kernel that waits and has one.
PROGRAMS = {
    "all_gather_forward_kernel": "collectives",
    "all_gather_gemm_forward_kernel": "all_gather_gemm",
    "all_reduce_one_shot_kernel": "collectives",
    "all_reduce_two_shot_kernel": "collectives",
    "all_to_all_forward_kernel": "collectives",
    "await_part_kernel": "gemm_reduce_scatter, copy engines",
    "gemm_reduce_scatter_forward_kernel": "gemm_reduce_scatter",
    "open_copies_kernel": "all_gather_gemm, copy engines",
    "reduce_scatter_forward_kernel": "collectives",
    "ring_attention_dq_kernel": "ring_attention",
    "ring_attention_forward_kernel": "ring_attention",
    "send_message_kernel": "messages",
    "shard_sum_kernel": "sharded_adamw",
    "sharded_adamw_kernel": "sharded_adamw",
    "sum_parts_kernel": "gemm_reduce_scatter, copy engines",
}


@functools.cache
def kernels() -> dict[str, bool]:
    """Return whether each kernel of tpfuse waits for other ranks, by its name, which Nsight shows."""
    functions: dict[_Function, set[_Function]] = {}
    for file in sorted(_folder().glob("*.py")):
        functions |= _functions(file)
    return {
        name: any(called == _WAIT for _, called in _reached((module, name), functions))
        for module, name in functions
        if name.endswith("_kernel")
    }


def _folder() -> Path:
    spec = importlib.util.find_spec("tpfuse.kernels")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _functions(file: Path) -> dict[_Function, set[_Function]]:
    """Return the functions that Triton compiles in a module of kernels, with the functions that each may call."""
    module, tree = file.stem, ast.parse(file.read_text(encoding="utf-8"))
    known = {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpfuse.kernels."):
            source = str(node.module).rpartition(".")[2]
            known |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return {
        (module, node.name): {known[name] for name in _names(node) if name in known}
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in _names(mark) for mark in node.decorator_list)
    }


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names and the attributes in a part of a program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _reached(first: _Function, functions: dict[_Function, set[_Function]]) -> set[_Function]:
    """Return the functions that a function calls, also through others, with itself."""
    reached, left = {first}, [first]
    while left:
        new = functions.get(left.pop(), set()) - reached
        reached |= new
        left += new
    return reached
