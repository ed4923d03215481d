"""The compile gate passes sound kernels and names the faults of flawed ones."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpfuse.kernels.launch import FAMILIES
from tpfuse.tools import compilation, gate
from tpfuse.tools.compilation import Report, compile_jobs, read_report
from tpfuse.tools.gate import table, version_of, violations
from tpfuse.tools.recorded import Job
from tpfuse.tools.resources import Compilation

TOYS = Path(__file__).parent / "toys"
COMPILE = f"""
import sys
from tpfuse.tools import operators as cases
cases.__path__.append({str(TOYS)!r})
from tpfuse.tools.compilation import main
sys.exit(main())
"""


def compile_toys(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", COMPILE, *flags], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiler's output for the toys."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def toys(kept: Path) -> Report:
    done = compile_toys("broken", "flawed", "sound", "--json", "--dtypes", "bfloat16", "--keep", str(kept))
    assert done.returncode == 1, done.stderr
    return read_report(done.stdout)


def results(report: Report, operator: str, family: str) -> list[Compilation]:
    return [result for result in report.compilations if (result.operator, result.family) == (operator, family)]


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_kernels_pass(toys: Report, family: str) -> None:
    copy, product = results(toys, "sound", family)
    assert not list(violations(copy))
    assert not list(violations(product))
    assert (copy.kernel, copy.loads, copy.stores, copy.dot) == ("copy_kernel", {16: 1}, {16: 1}, False)
    assert (product.dot, product.tensor_cores) == (True, [gate.NEWEST[family]])
    assert product.constants == {"BLOCK": 64, "BLOCK_K": 64}
    assert product.shared >= 2 * 64 * 64 * 2
    assert product.programs > 1


FLAWS = {
    "mismatched_kernel": "Shape element 0 must be a power of 2",
    "copy_kernel BLOCK=1024 WARP_SPECIALIZE=False": "in accesses of less than 16 bytes: loads {2: 8}",
    "copy_kernel BLOCK=1024 WARP_SPECIALIZE=True": "not specialized, although WARP_SPECIALIZE is set",
    "product_kernel BLOCK=32": "its dot uses mma.sync instructions instead of ",
    "product_kernel BLOCK=256": "bytes of registers",
    "product_kernel BLOCK=128": "bytes of shared memory",
    "prologue_kernel": " issue slots for each cycle",
}


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", FLAWS)
def test_each_flaw_is_named(toys: Report, family: str, start: str) -> None:
    (result,) = [result for result in results(toys, "flawed", family) if f" {start}" in gate.named(result)]
    lines = list(violations(result))
    if family == "sm_80" and "mma.sync" in FLAWS[start]:
        assert not lines, "mma.sync is what sm_80 has"
        return
    if family != "sm_90" and "issue" in FLAWS[start]:
        assert not lines, "issue slots are counted for sm_90 alone"
        return
    assert f"flawed {family} bfloat16 {start}" in lines[0]
    assert any(FLAWS[start] in line for line in lines)
    assert all("\n" not in line for line in lines)


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_launchers_that_raise_are_one_line(toys: Report, family: str) -> None:
    (result,) = results(toys, "broken", family)
    assert list(violations(result)) == [f"broken {family} bfloat16: ValueError: tiles of 3 rows"]


@pytest.mark.compile
def test_wgmma_that_ptxas_serializes_is_told(toys: Report) -> None:
    (result,) = [result for result in results(toys, "flawed", "sm_90") if result.spilled]
    assert "wait for one another: insufficient register resources" in list(violations(result))[1]


@pytest.mark.compile
def test_an_exception_needs_tensor_cores_all_the_same(toys: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = [result for result in results(toys, "flawed", "sm_90") if result.constants.get("BLOCK") == 32]
    (violation,) = violations(result)
    monkeypatch.setitem(gate.EXCEPTIONS, "sm_90 bfloat16 product_kernel BLOCK=32 ", "few rows")
    assert not list(violations(result))
    assert gate.slow(result) in violation
    without = Compilation(**vars(result) | {"tensor_cores": []})
    assert "does not use tensor cores" in next(violations(without))


@pytest.mark.compile
@pytest.mark.parametrize(("family", "kibibytes"), [("sm_80", 99), ("sm_90", 227), ("sm_100", 227)])
def test_shared_memory_up_to_the_limit(toys: Report, family: str, kibibytes: int) -> None:
    _, product = results(toys, "sound", family)
    assert not list(violations(Compilation(**vars(product) | {"shared": kibibytes * 1024})))
    assert list(violations(Compilation(**vars(product) | {"shared": kibibytes * 1024 + 1})))


@pytest.mark.compile
def test_sums_may_be_stored_one_by_one(toys: Report) -> None:
    copy, _ = results(toys, "sound", "sm_90")
    assert not list(violations(Compilation(**vars(copy) | {"loads": {16: 4}, "stores": {4: 2}})))
    assert list(violations(Compilation(**vars(copy) | {"loads": {16: 4}, "stores": {2: 32}})))


@pytest.mark.compile
def test_the_table(toys: Report) -> None:
    text = table(toys.compilations, toys.triton)
    assert version_of(text) == toys.triton
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    kernels = {(result.kernel or result.operator, result.family) for result in toys.compilations}
    assert len(lines) == 2 + len(kernels)
    (product,) = [line for line in lines if line.startswith("| product | sm_90 | ")]
    _, _, launches, registers, *_ = product.strip("| ").split(" | ")
    compiled = [x for x in toys.compilations if (x.kernel, x.family) == ("product_kernel", "sm_90") and not x.error]
    least, most = (f({x.registers for x in compiled}) for f in (min, max))
    assert registers == (f"{least} to {most}" if least < most else f"{least}")
    assert launches.startswith(f"{sum((x.kernel, x.family) == ('product_kernel', 'sm_90') for x in toys.compilations)}")


@pytest.mark.compile
def test_the_command_line_for_developers(toys: Report, kept: Path) -> None:
    done = compile_toys("sound", "--families", "sm_90", "--dtypes", "bfloat16", "--again")
    assert done.returncode == 0
    assert "sound sm_90 bfloat16 product_kernel BLOCK=64 BLOCK_K=64" in done.stdout
    stages = sorted(path.suffix for path in kept.glob("sound-*-sm_90-product_kernel.*"))
    assert stages == [".ptx", ".sass", ".ttgir", ".ttir"]
    wrong = compile_toys("sond")
    assert wrong.returncode == 2
    assert "there is no operator sond: expected one of" in wrong.stderr


@pytest.mark.compile
def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    """The command reads the results of whole compilations from the folder, and compiles a corrupt one again."""
    flags = ("sound", "--json", "--families", "sm_90", "--dtypes", "bfloat16", "--results", str(tmp_path))
    first = compile_toys(*flags)
    assert first.returncode == 0, first.stderr
    entries = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(entries) == 2
    corrupt = next(iter(entries))
    corrupt.write_bytes(entries[corrupt][:100])
    written = {path: path.stat().st_mtime_ns for path in entries}
    assert compile_toys(*flags).stdout == first.stdout
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == entries
    changed = [path for path, when in written.items() if path.stat().st_mtime_ns != when]
    assert changed == [corrupt]


def sass_widths(sass: str, instruction: str) -> dict[int, int]:
    """Return the counts that `access_widths` takes from PTX, taken from the machine code instead."""
    widths: dict[int, int] = {}
    for modifiers in re.findall(rf"{instruction}(\.[\w.]+) ", sass):
        width = next((int(part.strip("U")) // 8 for part in modifiers.split(".") if part in ("U16", "64", "128")), 4)
        widths[width] = widths.get(width, 0) + 1
    return widths


@pytest.mark.compile
def test_ptx_says_what_the_machine_code_does(toys: Report, kept: Path) -> None:
    seen = set()
    for index, result in enumerate(toys.compilations):
        if not result.error:
            (path,) = kept.glob(f"*-{index}-*.sass")
            sass = path.read_text()
            loads = sass_widths(sass, "LDG"), sass_widths(sass, "LDGSTS")
            assert {width: sum(x.get(width, 0) for x in loads) for width in loads[0] | loads[1]} == result.loads
            assert sass_widths(sass, "STG") == result.stores
            names = {"mma.sync": " HMMA.", "wgmma": " HGMMA.", "tcgen05": " UTCHMMA "}
            assert [name for name, text in names.items() if text in sass] == result.tensor_cores
            seen.update(result.tensor_cores)
    assert seen == set(gate.NEWEST.values())


SOUND = Compilation(
    "toy", "sm_90", "bfloat16", "toy_kernel", {"BLOCK": 64}, 4, 3,
    registers=64, shared=8192, programs=8, dot=True, tensor_cores=["wgmma"], loads={16: 4}, stores={16: 1},
)  # fmt: skip
COPY = {"dot": False, "tensor_cores": []}
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"error": "no power of 2"}, "no power of 2"),
    ({"spilled": 8}, "it spills 8 bytes of registers"),
    ({"shared": 227 * 1024 + 1}, "bytes of shared memory"),
    ({"tensor_cores": []}, "does not use tensor cores"),
    ({"tensor_cores": ["mma.sync"]}, "its dot uses mma.sync instructions instead of wgmma"),
    ({"serialized": "registers"}, "wait for one another: registers"),
    (
        COPY | {"loads": {16: 4}, "stores": {2: 32}},
        "moves 50% of its bytes in accesses of less than 16 bytes",
    ),
    ({"constants": {"WARP_SPECIALIZE": True}}, "not specialized, although WARP_SPECIALIZE is set"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_each_kind_of_complaint(fault: dict[str, Any], said: str) -> None:
    """The test sets each fault in a result by hand; the toys above show that a compiler's results have these faults."""
    assert not list(violations(SOUND, "3.7.1"))
    (line,) = violations(replace(SOUND, **fault), "3.7.1")
    assert line.startswith("toy sm_90 bfloat16 toy_kernel ") and said in line


def test_at_the_limits_nothing_is_said() -> None:
    assert not list(violations(replace(SOUND, shared=227 * 1024), "3.7.1"))
    assert not list(violations(replace(SOUND, loads={16: 4}, stores={4: 2}, **COPY), "3.7.1"))
    assert not list(violations(replace(SOUND, constants={"WARP_SPECIALIZE": True}, specialized=True), "3.7.1"))


def test_a_spill_is_accepted_under_the_version_that_it_is_listed_for() -> None:
    constants = {"ACTIVATION": "geglu", "BLOCK_M": 128}
    known = replace(SOUND, kernel="all_gather_gemm_forward_kernel", constants=constants, spilled=8)
    assert not list(violations(known, "3.6.0"))
    assert list(violations(replace(known, spilled=16), "3.6.0"))
    assert list(violations(known, "3.7.1"))
    assert list(violations(replace(known, dtype="float32"), "3.6.0"))
    assert list(violations(replace(known, family="sm_80"), "3.6.0")), "nobody has seen that family spill"


def test_a_compiler_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(job: Job) -> Any:
        os._exit(3)

    monkeypatch.setattr(compilation, "compiled", dies)
    source = SimpleNamespace(name="some_kernel", constants={}, fn=SimpleNamespace(params=[], arg_names=[]))
    jobs = [Job("some", "sm_90", "bfloat16", source, 4, stages) for stages in (1, 2, 3)]
    found = dict(compile_jobs(jobs))
    assert [found[index].num_stages for index in range(3)] == [1, 2, 3]
    assert {result.error for result in found.values()} == {"the compiler ended with exit status 3"}


@pytest.mark.compile
def test_the_cache_is_filled_without_a_look_at_what_kernels_take(tmp_path: Path) -> None:
    """Examining the kernels would run ptxas and other tools a second time."""
    program = """
import sys
from tpfuse.tools import compilation, resources

def never(*arguments):
    raise AssertionError("examined")

resources.examine = never
done = []
report = compilation.warm_cache(["dropout"], ["sm_90"], ["bfloat16"], done.append)
assert done == report.compilations != [] and not any(result.error for result in done), done
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*/*.cubin"))
