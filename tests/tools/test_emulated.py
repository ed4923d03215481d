"""Kernels compute the same as their references as they are compiled for GPUs, and protocols hold in compiled form.

The works (`emulated_cases`) run in Python processes that do not interpret kernels.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tpfuse.tools import operators
from tpfuse.tools.rank_programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
OTHERS = tuple(version for version in ("3.6.0", "3.7.1", "3.9.0") if version != triton.__version__)


def results(*works: tuple[Any, ...], version: str = triton.__version__, family: str = "sm_80") -> list[str]:
    """Return what `emulated_cases` prints for the works, under a version of Triton that `make test` has installed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = ROOT / "build" / f"triton-{version}"
    if version != triton.__version__ and not folder.is_dir():
        pytest.skip(f"Triton {version} is not in build/: make test installs it")
    paths = [str(ROOT)] if version == triton.__version__ else [str(folder), str(ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).with_name("emulated_cases.py")), json.dumps(works), family]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_kernel_of_each_family_is_right() -> None:
    works = [
        ("case", "gemm", "swiglu", "bfloat16"),
        ("case", "attention", "dropout", "bfloat16"),
        ("case", "layer_norm", "no bias", "bfloat16"),
        ("case", "cross_entropy", "vocabulary of 100", "bfloat16"),
        ("case", "adamw", "three updates", "bfloat16"),
        ("case", "dropout", "p 0.3", "bfloat16"),
        ("program", "all_gather_gemm", 2, "bfloat16", 2),
        *(
            ("program", name, 2, "bfloat16", 1)
            for name in ("gemm_reduce_scatter", "collectives", "messages", "ring_attention", "sharded_adamw")
        ),
    ]
    assert results(*works) == [""] * len(works)


@pytest.mark.compile
@pytest.mark.parametrize("version", [triton.__version__, *OTHERS])
def test_kernels_of_tutorials_are_right(version: str) -> None:
    assert results(("tutorials",), version=version) == [""]


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["sm_80", "sm_90"])
@pytest.mark.parametrize("version", [triton.__version__, *OTHERS])
def test_every_case_is_right(version: str, family: str) -> None:
    """Every kernel and variant; other versions of Triton compile each case in one dtype, and the dtypes take turns.

    The executor is the same under all versions. Another one adds what its compiler writes for a kernel: the kernels of
    two dtypes differ in conversions and in the instructions of products, and those occur in the cases of each dtype.
    """
    names = operators.names()
    works = [("cases", name, version == triton.__version__) for name in names]
    found = results(*works, version=version, family=family)
    assert dict(zip(names, found, strict=True)) == dict.fromkeys(names, "")


@pytest.mark.compile
@pytest.mark.parametrize("version", ["3.7.1", "3.9.0"])
def test_a_proxy_fence_that_the_compiler_leaves_out_is_found(version: str) -> None:
    """Triton 3.7.1 has no fence between cp.async and wgmma in the gradients of attention; 3.9.0 has it."""
    (found,) = results(("as_compiled", "attention", "documents", "bfloat16"), version=version, family="sm_90")
    assert ("no fence.proxy.async comes between" in found) == (version == "3.7.1")
    assert bool(found) == (version == "3.7.1")


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "worlds"), [("sm_80", (2, 4)), ("sm_90", (2,))])
def test_protocols_hold_in_compiled_form(family: str, worlds: tuple[int, ...]) -> None:
    works = [("program", *each, 2) for each in itertools.product(PROGRAMS, worlds, ("float32", "bfloat16"))]
    assert dict(zip(works, results(*works, family=family), strict=True)) == dict.fromkeys(works, "")


FOUND = (0, "")
DRAINED = "after its last loop the kernel does not use these places again"
OWN = "what is used next was used by nobody, by the same thread, or before another barrier"
JOINED = "the copies join the next group, for which the same wait waits"
FETCHED = "the loop has two rounds, and copies for them begin before it"
# Read in the PTX of Triton 3.7.1. 3 barriers follow the making of a tensor map: it is made, copied, fenced and used by
# warp 0. 8 stand between mbarrier.arrive.expect_tx and the bulk copies, or between two of these: warp 0 executes them
# all, and another barrier orders mbarrier.init before the waits, and products before the copies that replace operands.
# 1 follows the wait at an mbarrier, where each warp has waited itself before its products read the tile.
FIRST_WARP = "warp 0 alone does what comes before and after 11 of them, and each warp itself what comes before 1"
REPLACED = "a tensor map begins as the one before, each of whose fields is replaced"
# (family, what runs, kernel, at most so many mutants) -> mutation -> how many of them nothing finds, and why
PLANTED = {
    ("sm_80", "gemm", "gemm_forward_kernel", 8): {
        "no barrier": FOUND,
        "no wait for copies": FOUND,
        "a wait for one group of copies less": FOUND,
        "no commit of copies": (1, JOINED),
        "no copy": FOUND,
        "no store to shared memory": FOUND,
        "another place in shared memory": FOUND,
        "another place in global memory": FOUND,
        "two registers of a product swapped": FOUND,
        "two registers of a selection swapped": FOUND,
    },
    ("sm_80", "attention", "attention_forward_kernel", 8): {
        "no barrier": (4, OWN),
        "no wait for copies": (1, DRAINED),
        "a wait for one group of copies less": (1, DRAINED),
        "no commit of copies": (2, JOINED),
        "no copy": (1, FETCHED),
        "no store to shared memory": FOUND,
        "another place in shared memory": FOUND,
        "another place in global memory": FOUND,
        "a shuffle that exchanges nothing": FOUND,
        "two registers of a product swapped": FOUND,
        "two registers of a selection swapped": FOUND,
    },
    ("sm_80", "attention", "attention_backward_dkdv_kernel", 6): {
        "no barrier": FOUND,
        "no wait for copies": (1, DRAINED),
        "a wait for one group of copies less": (1, DRAINED),
        "no commit of copies": FOUND,
        "no copy": FOUND,
        "no store to shared memory": FOUND,
        "another place in shared memory": FOUND,
        "another place in global memory": FOUND,
        "two registers of a product swapped": FOUND,
        "two registers of a difference swapped": FOUND,
    },
    ("sm_80", "layer_norm", "norm_backward_kernel", 8): {
        "no barrier": FOUND,
        "no store to shared memory": FOUND,
        "another place in shared memory": FOUND,
        "another place in global memory": FOUND,
        "a shuffle that exchanges nothing": FOUND,
        "two registers of a difference swapped": FOUND,
    },
    # This product has tensor maps, wgmma and mbarriers.
    ("sm_90", "persistent gemm", "gemm_forward_kernel", 99): {
        "no barrier": (12, FIRST_WARP),
        "no store to shared memory": (1, REPLACED),
        "no proxy fence": FOUND,
        "no fence of a tensor map": FOUND,
        "no fence of registers": FOUND,
        "no wait for products": FOUND,
        "a wait for one group of products less": FOUND,
        "no commit of products": FOUND,
        "no product": FOUND,
        "no tile": FOUND,
        "no bytes are expected": FOUND,
        "no wait for a tile": FOUND,
        "a wait for another phase": FOUND,
        "no end of an mbarrier": FOUND,
    },
}


@pytest.mark.compile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("family", "name", "kernel", "most"), PLANTED)
def test_planted_faults_are_found(family: str, name: str, kernel: str, most: int) -> None:
    """A mutant is found by a check or by a number that differs."""
    expected = PLANTED[family, name, kernel, most]
    printed = results(*[("planted", name, kernel, mutation, most) for mutation in expected], family=family)
    left = {mutation: text.split("\n") for mutation, text in zip(expected, printed, strict=True)}
    assert "0 mutants" not in [lines.pop() for lines in left.values()]
    assert {mutation: len(lines) for mutation, lines in left.items()} == {x: expected[x][0] for x in expected}, left


HANDED_OVER = "programs of one rank hand chunks over in memory that is not symmetric, whose order is not checked"
# The same is planted in the first rounds of protocols on two ranks.
PLANTED_IN_PROTOCOLS = [
    ("collectives", "no release", 0, ""),
    ("collectives", "no acquire", 0, ""),
    ("collectives", "an acquire of the GPU alone", 0, ""),
    ("collectives", "a release of the GPU alone", 8, "only programs of one rank count those that have ended"),
    ("collectives", "no barrier", 3, "another barrier comes before the release too, or the grid has one program"),
    ("all_gather_gemm", "no release", 1, HANDED_OVER),
    ("all_gather_gemm", "no acquire", 1, HANDED_OVER),
]


@pytest.mark.compile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "mutation", "survivors", "reason"), PLANTED_IN_PROTOCOLS)
def test_planted_faults_of_a_protocol_are_found(name: str, mutation: str, survivors: int, reason: str) -> None:
    *left, count = results(("planted_in_protocol", name, mutation))[0].split("\n")
    assert count != "0 mutants"
    assert len(left) == survivors, left
