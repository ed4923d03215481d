"""The house stands: who may import whom, and what is installed."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kernels": ROOT / "kernels", "models": ROOT / "models"} | {
    path.parent.name: path.parent for path in (ROOT / "tpfuse").glob("*/__init__.py")
}
# Which folders of tpfuse each folder may import, itself aside.
ALLOWED = {
    "kernels": set(),
    "comm": {"kernels"},
    "ops": {"kernels", "comm"},
    "layers": {"ops", "comm"},
    "parallel": {"comm", "ops", "layers"},
    "models": {"layers", "ops", "parallel"},
    "train": {"comm", "layers", "parallel", "models", "profile"},
    "profile": {"kernels", "comm", "ops", "layers", "parallel", "models", "train", "testing"},
    "testing": {"comm"},
}
LIBRARY = ("kernels", "comm", "ops", "layers", "parallel", "models")
LIBRARY_PACKAGES = {"torch", "triton", "numpy", "einops", "safetensors", "tpfuse"}


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions included; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _violations(layer: str) -> Iterator[str]:
    for file in sorted(FOLDERS[layer].rglob("*.py")):
        for line, module in _imports(file):
            package, _, rest = module.partition(".")
            target = rest.partition(".")[0]
            place = f"{file.relative_to(ROOT)}:{line}: {module}"
            if package == "tpfuse" and target in FOLDERS and target not in ALLOWED[layer] | {layer}:
                yield place
            if layer in LIBRARY and package not in LIBRARY_PACKAGES | sys.stdlib_module_names:
                yield place
            if layer == "kernels" and module.startswith("torch.distributed"):
                yield place
            if layer == "kernels" and package == "tpfuse" and target != "kernels":
                yield place


def test_every_folder_has_its_row() -> None:
    assert FOLDERS.keys() == ALLOWED.keys()


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_arrows_point_down(layer: str) -> None:
    assert list(_violations(layer)) == []


def test_the_walk_sees_imports_inside_functions(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("import a.b\ndef f():\n    from c import d\n    import e as g\n")
    assert sorted(_imports(file)) == [(1, "a.b"), (3, "c.d"), (4, "e")]


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
