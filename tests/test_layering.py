"""The parts of tpfuse import only the parts that the table allows, and all packages are installed."""

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpfuse.errors import EXTRA

ROOT = Path(__file__).resolve().parent.parent
# A part is a folder of tpfuse without the folders that have rows of their own, or a module beside the folders. A row
# lists the parts that a part may import besides itself. It may only name parts of rows above it: so no two parts may
# import each other, also not through other parts.
ALLOWED: dict[str, set[str]] = {
    "_lazy": set(),
    "_version": set(),
    "errors": set(),
    "choices": set(),
    "nearest": set(),
    "kernels": set(),
    "switches": {"kernels", "choices"},
    "comm": {"_version", "kernels", "choices", "switches"},
    "comm.collectives": {"kernels", "comm"},
    "comm.messages": {"kernels", "comm", "comm.collectives"},
    "trace": {"kernels", "comm"},
    "checkpoint": {"errors", "comm"},
    "ops": {"kernels", "switches", "comm", "comm.collectives"},
    "ops.linear": {"kernels", "choices", "comm", "comm.collectives", "ops"},
    "ops.ring_attention": {"kernels", "choices", "switches", "comm", "comm.collectives", "ops"},
    "layers": {"_lazy", "comm", "comm.collectives", "ops", "ops.linear"},
    "parallel.pipeline": {"choices", "comm", "comm.collectives", "comm.messages"},
    "parallel": {"choices", "comm", "ops", "ops.ring_attention"},
    "zero.reducer": {"kernels", "comm", "comm.collectives", "ops"},
    "zero": {
        "choices", "comm", "comm.collectives", "ops", "layers", "parallel", "parallel.pipeline", "zero.reducer",
    },
    "drop_in": {
        "comm", "comm.collectives", "checkpoint", "ops", "ops.linear", "layers", "parallel", "parallel.pipeline",
        "zero",
    },
    "torchtitan": {"layers", "ops.linear"},
    "models": {"comm", "comm.collectives", "ops", "layers", "parallel", "parallel.pipeline"},
    "plan": {"nearest", "choices", "comm", "ops", "ops.ring_attention", "parallel.pipeline", "zero", "zero.reducer"},
    "train": {
        "_version", "errors", "nearest", "choices", "switches", "comm", "comm.collectives", "trace", "checkpoint",
        "ops", "layers", "parallel", "parallel.pipeline", "zero", "drop_in", "models", "plan",
    },
    "explore": {"comm"},
    "testing": {"comm"},
    "tools": {
        "_version", "errors", "kernels", "choices", "switches", "comm", "comm.collectives", "comm.messages",
        "checkpoint", "ops", "ops.linear", "ops.ring_attention", "layers", "models", "train", "explore", "testing",
    },
    "profile": {"_lazy", "errors", "comm", "trace", "checkpoint"},
    "commands": {
        "errors", "choices", "comm", "comm.collectives", "comm.messages", "checkpoint", "ops", "parallel.pipeline",
        "models", "plan", "train", "tools", "profile",
    },
    "cli": {"_version", "errors", "nearest", "comm", "comm.collectives", "checkpoint", "train", "tools", "commands"},
}  # fmt: skip
AT_THE_ROOT = {"kernels": ROOT / "kernels", "models": ROOT / "models"}
ABOVE_THE_LIBRARY = {"errors", "torchtitan", "train", "explore", "testing", "tools", "profile", "commands", "cli"}
LIBRARY = ALLOWED.keys() - ABOVE_THE_LIBRARY
LIBRARY_PACKAGES = {"torch", "triton", "numpy", "einops", "safetensors", "tpfuse"}
NO_COMMANDS = {"transformers", "pytest", "torchtitan", "spmd_types"}
ADAPTER = ROOT / "tpfuse" / "drop_in" / "huggingface.py"  # it alone knows transformers, and the Trainer, which is one
TRAINER = ADAPTER.with_name("trainer.py")


@functools.cache
def _contents(file: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Return (line, module) of every import, also inside functions, and the names of classes.

    `from a import b` counts as a.b.
    """
    found: list[tuple[int, str]] = []
    classes: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tpfuse":
            # tpfuse imports a public name when it is first used.
            found.append((node.lineno, f"tpfuse.{node.attr}"))
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return found, classes


def _imports(file: Path) -> list[tuple[int, str]]:
    return _contents(file)[0]


def _part(module: str) -> str | None:
    """Return the part of `module`, a name that begins with "tpfuse."; None if it is in tpfuse/__init__.py itself."""
    names = module.split(".")[1:]
    parts = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((part for part in parts if part in ALLOWED), None)


def _module(file: Path) -> str:
    """Return the name by which a file is imported."""
    names = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(names if names[0] == "tpfuse" else ("tpfuse", *names)).removesuffix(".__init__")


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (part, file) of all files except those of tpfuse/ that only start tpfuse."""
    for folder in (ROOT / "tpfuse", *AT_THE_ROOT.values()):
        for file in sorted(folder.rglob("*.py")):
            part = _part(_module(file))
            if part is not None:
                yield part, file
            else:
                names = file.relative_to(ROOT).with_suffix("").parts
                assert names[1:] in (("__init__",), ("__main__",), ("_layout",)), f"{file} has no row in ALLOWED"


def _may_import(part: str, module: str) -> bool:
    package = module.partition(".")[0]
    if package == "tpfuse":
        target = _part(module)
        return target is not None and target in ALLOWED[part] | {part}
    if part == "kernels" and module.startswith("torch.distributed"):
        return False
    return part not in LIBRARY or package in LIBRARY_PACKAGES | sys.stdlib_module_names


def test_every_part_has_its_row() -> None:
    assert {part for part, _ in _files()} == ALLOWED.keys()


def test_rows_only_name_rows_above_them() -> None:
    above: set[str] = set()
    for part, allowed in ALLOWED.items():
        assert allowed <= above, part
        above.add(part)


def test_rows_list_what_is_imported() -> None:
    imports = [(part, file, *found) for part, file in _files() for found in _imports(file)]
    places = [
        f"{file.relative_to(ROOT)}:{line}: {x}"
        for part, file, line, x in imports
        if not _may_import(part, x) and not (file in (ADAPTER, TRAINER) and x.partition(".")[0] == "transformers")
    ]
    assert not places, "\n".join(places)
    used = {(part, _part(module)) for part, _, _, module in imports if module.startswith("tpfuse.")}
    assert not {(part, other) for part, row in ALLOWED.items() for other in row} - used, "allowed, but not imported"


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and for annotations count too."""
    modules = {_module(file): file for _, file in _files()}
    imported: dict[str, set[str]] = {}
    for name, file in modules.items():
        found = {x if x in modules else x.rpartition(".")[0] for _, x in _imports(file)}
        imported[name] = found & modules.keys() - {name}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names a circle


def test_every_command_looks_for_all_packages_that_are_not_the_librarys() -> None:
    """`optional_package` imports those of other extras, and no command imports these four."""
    imported = {module.partition(".")[0] for _, file in _files() for _, module in _imports(file)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", package)[0].replace("-", "_") for package in project["optional-dependencies"]["train"]]
    assert imported - sys.stdlib_module_names - LIBRARY_PACKAGES - NO_COMMANDS == set(names)
    assert list(EXTRA) == names == sorted(names)


def test_transformers_is_imported_inside_functions() -> None:
    functions = [node for node in ast.walk(ast.parse(ADAPTER.read_text())) if isinstance(node, ast.FunctionDef)]
    inside = [range(node.lineno, node.end_lineno or 0) for node in functions]
    lines = [line for line, module in _imports(ADAPTER) if module.startswith("transformers")]
    assert lines and all(any(line in function for function in inside) for line in lines)


def test_imports_inside_functions_are_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("import a.b\ndef f():\n    from c import d\n    import e as g\n    return tpfuse.h.i\n")
    assert sorted(_imports(file)) == [(1, "a.b"), (3, "c.d"), (4, "e"), (5, "tpfuse.h")]


def test_only_their_own_tests_import_the_benchmarks() -> None:
    files = [
        file for name in ("kernels", "models", "tpfuse", "examples", "tests") for file in (ROOT / name).rglob("*.py")
    ]
    others = [file for file in files if (ROOT / "tests" / "benchmarks") not in file.parents]
    assert len(others) > 500
    assert not [file for file in others for _, module in _imports(file) if module.partition(".")[0] == "benchmarks"]


def test_bare_names_of_the_root_folders_are_never_imported() -> None:
    files = [
        file
        for folder in ("kernels", "models", "tpfuse", "tests", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 50
    for file in files:
        for line, module in _imports(file):
            assert module.partition(".")[0] not in ("kernels", "models"), f"{file}:{line}"


@pytest.mark.parametrize("name", ["kernels", "models"])
def test_root_packages_hold_a_docstring_and_stay_flat(name: str) -> None:
    tree = ast.parse((ROOT / name / "__init__.py").read_text())
    assert len(tree.body) == 1 and ast.get_docstring(tree)
    assert not [path for path in (ROOT / name).iterdir() if path.is_dir() and path.name != "__pycache__"]


def test_installed_packages_are_those_that_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    inside = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "tpfuse").rglob("__init__.py")}
    assert sorted(settings["packages"]) == sorted(inside | {"tpfuse.kernels", "tpfuse.models"})
    for name in ("kernels", "models"):
        assert settings["package-dir"][f"tpfuse.{name}"] == name


def test_no_file_is_called_utils_or_helpers() -> None:
    for folder in ("kernels", "models", "tpfuse", "tests"):
        assert not [path for path in (ROOT / folder).rglob("*.py") if path.stem in ("utils", "helpers")]


def test_a_class_name_has_one_meaning() -> None:
    files: dict[str, set[str]] = {}
    for folder in ("kernels", "models", "tpfuse", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in _contents(file)[1]:
                files.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
