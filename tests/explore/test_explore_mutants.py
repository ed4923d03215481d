"""Mutants of a protocol's source: which there are, that the explorer finds them, and that modules are restored."""

import ast
import importlib
import importlib.util
import linecache
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from triton.runtime import interpreter

from tpfuse.explore import ExploreError, explore
from tpfuse.explore.fresh_modules import fresh
from tpfuse.explore.mutants import mutants_of, surviving

FOLDER = Path(__file__).parent / "protocols"


@pytest.fixture(scope="module")
def modules():
    """The modules ring_signals and ring; the latter imports the former."""
    found = []
    for name in ("ring_signals", "ring"):
        spec = importlib.util.spec_from_file_location(f"tpfuse_tests_{name}", FOLDER / f"{name}.py")
        found.append(importlib.util.module_from_spec(spec))
        sys.modules[spec.name] = found[-1]
        spec.loader.exec_module(found[-1])
    yield found
    for module in found:
        del sys.modules[module.__name__]


def program_of(signals, ring):
    assert ring.signal is signals.signal and ring.advance is signals.advance
    return ring.program


def described(mutants):
    return [f"{Path(mutant.file).stem}:{mutant.lines[0]} {mutant.text}: {mutant.change}" for mutant in mutants]


def test_every_line_that_orders_has_its_mutants(modules) -> None:
    signals, ring = modules
    count = "if tl.atomic_add(state_ptr + 1, 1) + 1 == tl.num_programs(0):"
    look = 'while tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE) < epoch:'
    assert described(mutants_of(signals)) == [
        "ring_signals:9 tl.debug_barrier(): deleted",
        "ring_signals:10 tl.atomic_xchg(: deleted",
        "ring_signals:10 tl.atomic_xchg(: release -> relaxed",
        "ring_signals:10 tl.atomic_xchg(: scope sys -> gpu",
        'ring_signals:19 def wait_signal(flag_ptr, epoch, SCOPE: tl.constexpr = "sys"):: scope sys -> gpu',
        f"ring_signals:20 {look}: acquire -> relaxed",
        f"ring_signals:20 {look}: deleted",
        "ring_signals:27 epoch = tl.load(state_ptr) + 1: epoch not advanced",
        "ring_signals:28 tl.debug_barrier(): deleted",
        f"ring_signals:29 {count}: adds nothing",
        f"ring_signals:29 {count}: acq_rel (default) -> relaxed",
        f"ring_signals:29 {count}: acq_rel (default) -> acquire",
        f"ring_signals:29 {count}: acq_rel (default) -> release",
        "ring_signals:30 tl.store(state_ptr + 1, 0): deleted",
        "ring_signals:31 tl.store(state_ptr, epoch): deleted",
    ]
    assert described(mutants_of(ring, signals)) == [
        "ring:14 epoch = tl.load(state_ptr) + 1: epoch not advanced",
        "ring:21 signal(flags_right + pid, epoch): deleted",
        "ring:22 if wait_signal(flags + pid, epoch):: deleted (True)",
        "ring:24 advance(state_ptr): deleted",
        "ring:37 epoch += 1  # noqa: SIM113: deleted",
        "ring:39 memory.signal(here, 0, rank, epoch): deleted",
        'ring:42 memory.wait_signal(here, 0, peer, epoch, op="ring", peer=peer): deleted',
        "ring:45 memory.barrier()  # before slots and sums are written again: deleted",
        *described(mutants_of(signals)),
    ]


def test_mutants_of_a_function_are_those_of_its_lines(modules) -> None:
    signals, ring = modules
    assert [mutant.lines[0] for mutant in mutants_of(signals.wait_signal)] == [19, 20, 20]
    assert [mutant.lines[0] for mutant in mutants_of(ring.program, signals.signal)][:4] == [37, 39, 42, 45]
    with pytest.raises(ValueError, match="described has no line that synchronises"):
        mutants_of(described)


def test_mutants_keep_their_line_numbers(modules) -> None:
    for mutant in mutants_of(*modules):
        original = Path(mutant.file).read_text()
        assert len(mutant.source.splitlines()) == len(original.splitlines())
        first, last = mutant.lines
        changed = [
            number
            for number, (old, new) in enumerate(
                zip(original.splitlines(), mutant.source.splitlines(), strict=True), start=1
            )
            if old != new
        ]
        assert changed and first <= changed[0] <= changed[-1] <= last, mutant
        ast.parse(mutant.source)


def test_a_relaxed_atomic_has_no_mutants(tmp_path, monkeypatch) -> None:
    (tmp_path / "tpfuse_tests_relaxed.py").write_text(
        "import triton.language as tl\n"
        "def poll(abort):\n"
        '    aborted = tl.atomic_add(abort, 0, sem="relaxed", scope="sys")\n'
        '    return tl.atomic_cas(abort, 0, 1, "acquire", "sys")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = mutants_of(importlib.import_module("tpfuse_tests_relaxed"))
    assert [(mutant.lines[0], mutant.change) for mutant in found] == [
        (4, "acquire -> relaxed"),
        (4, "scope sys -> gpu"),
    ]


def test_every_mutant_is_found(modules) -> None:
    assert described(surviving(program_of, modules, 2)) == []


def test_a_mutant_without_a_line_that_is_not_needed_survives(modules) -> None:
    """The program does not need a second barrier of all ranks right after the first one."""
    ring = modules[1]
    source = Path(ring.__file__).read_text()
    barrier = "        memory.barrier()  # before slots and sums are written again\n"
    with fresh([ring], {ring.__name__: source.replace(barrier, barrier + "        memory.barrier()\n")}) as [copy]:
        left = [mutant for mutant in mutants_of(copy) if "memory.barrier()" in mutant.text]
        assert len(left) == 2
    survivors = surviving(program_of, modules, 2, mutants=left)
    assert survivors == left


def test_a_scope_may_be_narrow_if_no_two_ranks_use_the_word(modules) -> None:
    """The counter in `state` needs no scope wider than its GPU; a wider one is no fault, nor is narrowing it again."""
    signals = modules[0]
    source = Path(signals.__file__).read_text().replace("state_ptr + 1, 1)", 'state_ptr + 1, 1, scope="sys")')
    with fresh(modules, {signals.__name__: source}) as [copy, _]:
        narrowed = [m for m in mutants_of(copy) if "state_ptr" in m.text and m.change == "scope sys -> gpu"]
        assert len(narrowed) == 1
        narrowed = [replace(mutant, file=signals.__file__) for mutant in narrowed]
    assert surviving(program_of, modules, 2, mutants=narrowed) == []


def test_an_unchanged_program_that_fails_raises(modules) -> None:
    def program_of(signals, ring):
        def program(memory):
            raise AssertionError("wrong from the beginning")

        return program

    with pytest.raises(ExploreError, match="wrong from the beginning"):
        surviving(program_of, modules, 2)


def test_the_original_modules_are_restored(modules) -> None:
    signals, ring = modules
    explore(ring.program, 2, seeds=())
    cached, rewritten = set(linecache.cache), len(interpreter.InterpretedFunction.rewritten_fn)
    finders = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), fresh(modules) as copies:
        assert [module.__name__ for module in copies] == [module.__name__ for module in modules]
        assert not set(copies) & set(modules)
        assert importlib.import_module(signals.__name__) is copies[0]
        explore(copies[1].program, 2, seeds=())
        1 / 0  # noqa: B018
    assert [importlib.import_module(module.__name__) for module in modules] == modules
    assert sys.meta_path == finders and set(linecache.cache) <= cached | {signals.__file__, ring.__file__}
    assert len(interpreter.InterpretedFunction.rewritten_fn) <= rewritten


def test_copies_in_a_package_are_found_by_every_form_of_import(tmp_path, monkeypatch) -> None:
    package = tmp_path / "tpfuse_tests_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("VALUE = 1\n")
    (package / "outer.py").write_text(
        "from tpfuse_tests_package import inner\n"
        "from tpfuse_tests_package.inner import VALUE\nimport tpfuse_tests_package.inner\n"
        "def values():\n    from tpfuse_tests_package.inner import VALUE as late\n"
        "    return VALUE, inner.VALUE, tpfuse_tests_package.inner.VALUE, late\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outer = importlib.import_module("tpfuse_tests_package.outer")
    inner = importlib.import_module("tpfuse_tests_package.inner")
    with fresh([outer, inner], {inner.__name__: "VALUE = 2\n"}) as copies:
        assert copies[0].values() == (2, 2, 2, 2)
    assert outer.values() == (1, 1, 1, 1)
    assert sys.modules["tpfuse_tests_package"].inner is inner
