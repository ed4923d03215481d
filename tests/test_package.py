"""The distributions hold the whole tree, and a wheel without extras runs what needs the library alone."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tpfuse
from tpfuse.cli import COMMANDS
from tpfuse.errors import EXTRA

ROOT = Path(__file__).resolve().parents[1]
NAME = f"tpfuse-{tpfuse.__version__}"
pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Built:
    """files: of the repository, without those whose names begin with a dot. wheel: built from the unpacked sdist."""

    files: set[str]
    sdist: Path
    wheel: Path


def _build(what: str, source: Path, into: Path) -> Path:
    """Build an sdist or a wheel of a folder as `python -m build` does, but with the setuptools at hand."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, into], cwd=source, check=True, capture_output=True)
    (built,) = into.glob("*.tar.gz" if what == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if not (ROOT / ".git").exists():
        pytest.skip("only git knows which files belong to the repository")
    folder = tmp_path_factory.mktemp("built")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    files = {name for name in listed if not name.startswith(".") and (ROOT / name).exists()}
    for name in files:
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name)
    sdist = _build("sdist", folder / "tree", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return Built(files, sdist, _build("wheel", folder / "unpacked" / NAME, folder))


def test_the_sdist_holds_the_repository(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {item.name.removeprefix(f"{NAME}/") for item in archive if item.isfile()}
    assert {name for name in names if not name.startswith("tpfuse.egg-info/")} == built.files | {
        "PKG-INFO",
        "setup.cfg",
    }


def test_the_wheel_holds_the_packages(built: Built) -> None:
    packages = {name for name in built.files if name.startswith(("tpfuse/", "kernels/", "models/"))}
    expected = {name if name.startswith("tpfuse/") else f"tpfuse/{name}" for name in packages}
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    with zipfile.ZipFile(built.wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    assert len(names) == len(set(names))
    assert set(names) == expected | {f"{NAME}.dist-info/{name}" for name in about}
    assert {"tpfuse/py.typed", "tpfuse/commands/watch.html", "tpfuse/models/tiny.toml"} <= expected


def _needed(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that these requirements install here."""
    names: set[str] = set()
    open_ = [Requirement(text) for text in requirements]
    while open_:
        requirement = open_.pop()
        if requirement.name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(requirement.name)
        open_ += map(Requirement, importlib.metadata.requires(requirement.name) or ())
    return names


@pytest.fixture(scope="module")
def without_extras(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment's folder of programs: tpfuse's wheel, and links to what its dependencies bring."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in _needed([text for text in importlib.metadata.requires("tpfuse") or () if "extra ==" not in text]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "bin", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, built.wheel], check=True)
    return python.parent


def _run(program: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    ours = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run([program, *arguments], cwd=program.parent, env=environment, capture_output=True, text=True)


def test_a_wheel_without_extras_runs_what_needs_the_library_alone(without_extras: Path) -> None:
    imports = f"""
import importlib.util, tpfuse
import tpfuse.train.batches, tpfuse.train.trainer  # `tpfuse verify` trains too
assert not [name for name in {EXTRA} if importlib.util.find_spec(name)]
print(tpfuse.__file__, *[getattr(tpfuse, name) for name in tpfuse.__all__])
"""
    found = _run(without_extras / "python", "-c", imports)
    assert found.returncode == 0, found.stderr
    needed = "ImportError: tpfuse.ParallelTrainer needs transformers 5.24 or newer: pip install transformers"
    refused = _run(without_extras / "python", "-c", "from tpfuse import *; import tpfuse; tpfuse.ParallelTrainer")
    assert refused.stderr.splitlines()[-1] == needed
    assert found.stdout.startswith(str(without_extras.parent)), "the wheel's, not the checkout's"
    program = without_extras / "tpfuse"
    assert _run(program, "--version").stdout == f"tpfuse {tpfuse.__version__}\n"
    assert "usage: tpfuse COMMAND" in _run(program, "--help").stdout
    for name, command in COMMANDS.items():
        arguments = ["--operators", "rms_norm"] if name == "verify" else []
        done = _run(program, name, *arguments)
        if command.alone:
            assert "Traceback" not in done.stderr and done.stdout, done.stderr
            verdict = "passed: " if name == "verify" else "nothing fails" if done.returncode == 0 else "will make"
            assert verdict in done.stdout.splitlines()[-1]
        else:
            needed = f"error: this command needs the packages {', '.join(EXTRA)}: pip install 'tpfuse[train]'\n"
            assert (done.returncode, done.stderr) == (2, f"tpfuse {name}: {needed}")
