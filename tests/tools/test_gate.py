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

from tests.support.compilations import compiling, read_report
from tpfuse.tools import compilation, gate
from tpfuse.tools.assembler import newer_ptxas
from tpfuse.tools.compilation import CompilationReport, compile_jobs
from tpfuse.tools.gate import violations
from tpfuse.tools.recorded import Job
from tpfuse.tools.resources import Compilation, unequal_sum
from tpfuse.tools.wgmma_hazards import hazards

TOYS = Path(__file__).parent / "toys"
COMPILE = f"""
import sys
from tpfuse.tools import operators as cases
cases.__path__.append({str(TOYS)!r})
from tpfuse.tools.compilation import main
sys.exit(main())
"""


# sm_80 has no instructions of its own: those of its products are in a kernel for sm_90 too.
FAMILIES = ("sm_90", "sm_100")
TWO = ("--families", *FAMILIES, "--dtypes", "bfloat16")


def compile_toys(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = compiling() | variables
    return subprocess.run([sys.executable, "-c", COMPILE, *flags], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiler's output for the toys."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def toys(kept: Path) -> CompilationReport:
    done = compile_toys("broken", "flawed", "sound", "--json", *TWO, "--keep", str(kept))
    assert done.returncode == 1, done.stderr
    return read_report(done.stdout)


def results(report: CompilationReport, operator: str, family: str) -> list[Compilation]:
    return [result for result in report.compilations if (result.operator, result.family) == (operator, family)]


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_kernels_pass(toys: CompilationReport, family: str) -> None:
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
    "copy_kernel BLOCK=1024": "in accesses of less than 16 bytes: loads {2: 8}",
    "product_kernel BLOCK=32": "its dot uses mma.sync instructions instead of ",
    "product_kernel BLOCK=256": "bytes of registers",
    "product_kernel BLOCK=128": "bytes of shared memory",
}


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", FLAWS)
def test_each_flaw_is_named(toys: CompilationReport, family: str, start: str) -> None:
    (result,) = [result for result in results(toys, "flawed", family) if f" {start}" in gate.named(result)]
    lines = list(violations(result))
    assert f"flawed {family} bfloat16 {start}" in lines[0]
    assert any(FLAWS[start] in line for line in lines)
    assert all("\n" not in line for line in lines)


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_a_launcher_that_raises_gives_one_line(toys: CompilationReport, family: str) -> None:
    (result,) = results(toys, "broken", family)
    assert list(violations(result)) == [f"broken {family} bfloat16: ValueError: tiles of 3 rows"]


@pytest.mark.compile
def test_wgmma_that_ptxas_serializes_is_reported(toys: CompilationReport) -> None:
    (result,) = [result for result in results(toys, "flawed", "sm_90") if result.spilled]
    assert "wait for one another: insufficient register resources" in list(violations(result))[1]


@pytest.mark.compile
def test_the_command(toys: CompilationReport, kept: Path) -> None:
    stages = sorted(path.suffix for path in kept.glob("sound-*-sm_90-product_kernel.*"))
    assert stages == [".ptx", ".sass", ".ttgir", ".ttir"]
    done = compile_toys("sound", "--families", "sm_90", "--dtypes", "bfloat16")
    assert done.returncode == 0 and "sound sm_90 bfloat16 product_kernel BLOCK=64 BLOCK_K=64" in done.stdout


def test_an_unknown_operator_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["compilation", "sond"])
    with pytest.raises(SystemExit, match="2"):
        compilation.main()
    assert "there is no operator sond: expected one of" in capsys.readouterr().err


@pytest.mark.compile
def test_a_newer_assembler_serves_hopper(toys: CompilationReport, kept: Path, tmp_path: Path) -> None:
    newer = newer_ptxas()
    if newer is None:
        pytest.skip("there is none newer than Triton's own")
    flags = ("sound", "--families", "sm_90", "--dtypes", "bfloat16", "--json", "--keep", str(tmp_path))
    report = read_report(compile_toys(*flags, TRITON_PTXAS_PATH=newer.path).stdout)
    assert [result.tensor_cores for result in report.compilations] == [[], ["wgmma"]]
    assert not any(line for result in report.compilations for line in violations(result))
    ptx = ["".join(path.read_text() for path in folder.glob("sound-*-sm_90-*.ptx")) for folder in (kept, tmp_path)]
    versions = [set(re.findall(r"^\.version (\S+)", text, re.MULTILINE)) for text in ptx]
    assert all(versions) and versions[0].isdisjoint(versions[1]), "its PTX is as new as its assembler"


@pytest.mark.compile
def test_hazards_are_found_where_waits_are_removed(kept: Path, toys: CompilationReport) -> None:
    """The toys' products are sound. Without its waits a product's accumulators are read while it may be running."""
    assert not any(result.hazards for result in toys.compilations)
    (path,) = kept.glob("sound-*-sm_90-product_kernel.sass")
    sass = path.read_text()
    assert not hazards(sass) and sass.count("WARPGROUP.DEPBAR") > 1
    found = hazards(sass.replace("WARPGROUP.DEPBAR", "NOP"))
    assert any("accesses the accumulators of the wgmma" in line for line in found)


def sass_widths(sass: str, instruction: str) -> dict[int, int]:
    """Return the counts that `access_widths` takes from PTX, taken from the machine code instead."""
    widths: dict[int, int] = {}
    for modifiers in re.findall(rf"{instruction}(\.[\w.]+) ", sass):
        width = next((int(part.strip("U")) // 8 for part in modifiers.split(".") if part in ("U16", "64", "128")), 4)
        widths[width] = widths.get(width, 0) + 1
    return widths


@pytest.mark.compile
def test_figures_from_ptx_agree_with_the_machine_code(toys: CompilationReport, kept: Path) -> None:
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
    ({"shared": 227 * 1024 + 1}, "uses 232449 bytes of shared memory; 232448 are allowed"),
    ({"family": "sm_80", "tensor_cores": ["mma.sync"], "shared": 99 * 1024 + 1}, "bytes of shared memory"),
    ({"tensor_cores": []}, "does not use tensor cores"),
    ({"tensor_cores": ["mma.sync"]}, "its dot uses mma.sync instructions instead of wgmma"),
    ({"serialized": "registers"}, "wait for one another: registers"),
    ({"hazards": ["MOV at 0010 writes", "LDS at 0020"]}, "is wrong: MOV at 0010 writes, and 1 more such accesses"),
    ({"unequal": "fma.rn.f32 %r4, %r1, %r1, %r3"}, "two lanes have different sums (see `kernels.tiles.product`): fma"),
    (
        COPY | {"loads": {16: 4}, "stores": {2: 32}},
        "moves 50% of its bytes in accesses of less than 16 bytes",
    ),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_each_violation_has_a_message(fault: dict[str, Any], message: str) -> None:
    """The test sets each fault in a result by hand; the toys above show that a compiler's results have these faults."""
    assert not list(violations(SOUND, "3.7.1"))
    (line,) = violations(replace(SOUND, **fault), "3.7.1")
    assert line.startswith(f"toy {fault.get('family', 'sm_90')} bfloat16 ") and message in line


# A sum of squares over two lanes, as Triton 3.6 to 3.9 write it
LANES = """
    mul.f32 %r2, %r1, %r1;
    shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;
    fma.rn.f32 %r4, %r1, %r1, %r3;
"""


def test_a_sum_that_differs_between_lanes_is_found() -> None:
    assert unequal_sum(LANES).startswith("fma.rn.f32 %r4")
    moved = LANES.replace("    shfl", "    mov.b32 %r9, %r2;\n    shfl").replace("%r3, %r2,", "%r3, %r9,")
    assert unequal_sum(moved).startswith("fma.rn.f32 %r4")
    rounded = LANES.replace("mul.f32 %r2, %r1, %r1", "fma.rn.f32 %r2, %r1, %r1, 0f00000000")
    assert not unequal_sum(rounded) and not unequal_sum(LANES.replace("%r1, %r1, %r3", "%r1, %r5, %r3"))


SPILLING = {"kernel": "all_gather_gemm_forward_kernel", "constants": {"ACTIVATION": "geglu"}, "spilled": 8}


@pytest.mark.parametrize(
    "change",
    [
        {"shared": 227 * 1024},
        {"family": "sm_80", "tensor_cores": ["mma.sync"], "shared": 99 * 1024},
        COPY | {"loads": {16: 4}, "stores": {4: 2}},  # sums may be stored one by one
        SPILLING,
    ],
)
def test_a_result_at_a_limit_passes(change: dict[str, Any]) -> None:
    """Triton 3.6 may spill in the kernel of `SPILLING`."""
    assert not list(violations(replace(SOUND, **change), "3.6.0"))


@pytest.mark.parametrize(
    ("change", "version"),
    [({"spilled": 16}, "3.6.0"), ({}, "3.7.1"), ({"dtype": "float32"}, "3.6.0"), ({"family": "sm_80"}, "3.6.0")],
)
def test_a_spill_is_accepted_only_for_its_kernel_and_version(change: dict[str, Any], version: str) -> None:
    assert any("spills" in line for line in violations(replace(SOUND, **SPILLING | change), version))


def test_an_exception_needs_tensor_cores_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(SOUND, tensor_cores=["mma.sync"])
    monkeypatch.setitem(gate.EXCEPTIONS, "sm_90 bfloat16 toy_kernel BLOCK=64 ", "few rows")
    assert not list(violations(slow)) and gate.slow(slow)
    assert "does not use tensor cores" in next(violations(replace(slow, tensor_cores=[])))


def test_a_compiler_that_dies_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is taken when a core is free for it: by then another process may have stored its result."""

    def dies(job: Job) -> Any:
        os._exit(3)

    monkeypatch.setattr(compilation, "compiled", dies)
    monkeypatch.setattr(compilation, "_stored", lambda job: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    source = SimpleNamespace(name="some_kernel", constants={}, fn=SimpleNamespace(params=[], arg_names=[]))
    waiting = [Job("some", "sm_90", "bfloat16", source, 4, stages) for stages in (3, 2, 1)]
    results_by_index: dict[int, Compilation] = {}
    for index, result in compile_jobs(waiting.pop() for _ in range(3)):
        results_by_index[index] = result
        assert len(waiting) == 2 - index
    assert [results_by_index[index].num_stages for index in range(3)] == [1, 2, 3]
    assert {result.error for result in results_by_index.values()} == {"the compiler ended with exit status 3"}
