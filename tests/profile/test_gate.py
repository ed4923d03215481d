"""The compiler's gate lets sound kernels through and names what is wrong with flawed ones."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpfuse.kernels.launch import FAMILIES
from tpfuse.profile import compilation, gate
from tpfuse.profile.compilation import Report, compile_jobs, read_report
from tpfuse.profile.gate import complaints, table, version_of
from tpfuse.profile.recorded import Job
from tpfuse.profile.resources import Compilation

TOYS = Path(__file__).parent / "toys"
COMPILE = f"""
import sys
from tpfuse.profile import cases
cases.__path__.append({str(TOYS)!r})
from tpfuse.profile.compilation import main
sys.exit(main())
"""


def compile_toys(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", COMPILE, *flags], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def toys() -> Report:
    done = compile_toys("sound", "flawed", "--json", "--dtypes", "bfloat16")
    assert done.returncode == 1, done.stderr
    return read_report(done.stdout)


def results(report: Report, operator: str, family: str) -> list[Compilation]:
    return [result for result in report.compilations if (result.operator, result.family) == (operator, family)]


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_kernels_pass(toys: Report, family: str) -> None:
    copy, product = results(toys, "sound", family)
    assert not list(complaints(copy))
    assert not list(complaints(product))
    assert (copy.kernel, copy.loads, copy.stores, copy.dot) == ("copy_kernel", {16: 1}, {16: 1}, False)
    assert (product.dot, product.tensor_cores) == (True, [gate.NEWEST[family]])
    assert product.constants == {"BLOCK": 64, "BLOCK_K": 32}
    assert product.shared >= 2 * 64 * 32 * 2
    assert product.programs > 1


FLAWS = {
    "mismatched_kernel": "Shape element 0 must be a power of 2",
    "copy_kernel BLOCK=1024 WARP_SPECIALIZE=False": "loaded in accesses of less than 16 bytes: {2: 8}",
    "copy_kernel BLOCK=1024 WARP_SPECIALIZE=True": "as WARP_SPECIALIZE asks for",
    "product_kernel BLOCK=32": " instruction for its dot, HMMA instead",
    "product_kernel BLOCK=256": "registers are spilled",
    "product_kernel BLOCK=128": "bytes of shared memory",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", FLAWS)
def test_each_flaw_is_named(toys: Report, family: str, start: str) -> None:
    (result,) = [result for result in results(toys, "flawed", family) if f" {start}" in gate.named(result)]
    lines = list(complaints(result))
    if family == "sm_80" and FLAWS[start].endswith("HMMA instead"):
        assert not lines, "HMMA is what sm_80 has"
        return
    assert f"flawed {family} bfloat16 {start}" in lines[0]
    assert FLAWS[start] in lines[0]
    assert all("\n" not in line for line in lines)


def test_wgmma_that_ptxas_serializes_is_told(toys: Report) -> None:
    assert [result.serialized for result in results(toys, "flawed", "sm_90") if result.spilled] == [True]
    (result,) = [result for result in results(toys, "flawed", "sm_90") if result.spilled]
    assert "serializes" in list(complaints(result))[1]


def test_an_exception_needs_tensor_cores_all_the_same(toys: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gate.EXCEPTIONS, ("product_kernel", "BLOCK=32"), "few rows")
    (result,) = [result for result in results(toys, "flawed", "sm_90") if result.constants["BLOCK"] == 32]
    assert not list(complaints(result))
    without = Compilation(**vars(result) | {"tensor_cores": []})
    assert "no tensor core instead" in next(complaints(without))


def test_the_table(toys: Report) -> None:
    text = table(toys.compilations, toys.triton)
    assert version_of(text) == toys.triton
    assert text.count("\n## ") == 2 * len(FAMILIES)
    assert "| product | BLOCK=64 BLOCK_K=32 | bfloat16 | 4 | 3 |" in text
    assert "Shape element 0 must be a power of 2" in text


def test_the_command_line_for_developers(tmp_path: Path) -> None:
    flags = ["sound", "--families", "sm_90", "--dtypes", "float16"]
    done = compile_toys(*flags, "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0
    assert "sound sm_90 float16 product_kernel BLOCK=64 BLOCK_K=32" in done.stdout
    kept = sorted(path.name for path in (tmp_path / "kept").glob("*product*"))
    assert kept == [f"sound-1-sm_90-product_kernel.{stage}" for stage in ("ptx", "sass", "ttgir", "ttir")]
    assert "wgmma" in (tmp_path / "kept" / kept[0]).read_text()
    assert "HGMMA" in (tmp_path / "kept" / kept[1]).read_text()
    wrong = compile_toys("sond")
    assert wrong.returncode == 2
    assert "there is no operator sond: expected one of" in wrong.stderr


def test_a_compiler_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(job: Job) -> Any:
        os._exit(3)

    monkeypatch.setattr(compilation, "compiled", dies)
    source = SimpleNamespace(name="some_kernel", constants={}, fn=SimpleNamespace(params=[], arg_names=[]))
    jobs = [Job("some", "sm_90", "bfloat16", source, 4, stages) for stages in (1, 2, 3)]
    found = dict(compile_jobs(jobs))
    assert [found[index].num_stages for index in range(3)] == [1, 2, 3]
    assert {result.error for result in found.values()} == {"the compiler ended with exit status 3"}
