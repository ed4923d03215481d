"""Kernels compute the same as their references as they are compiled for GPUs, and protocols hold in compiled form.

The works (`emulated_cases`) run in Python processes that do not interpret kernels: one for each version of Triton and
family of GPUs at a time, since they compile for most of their time, and each compiles a kernel once.
"""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.support.compilations import OTHER_TRITONS, compiling
from tpfuse.tools import operators, verify
from tpfuse.tools.rank_programs import PROGRAMS

HERE = triton.__version__
_running: dict[tuple[str, str], subprocess.Popen[str]] = {}  # at most one


def results(*works: tuple[Any, ...], version: str = HERE, family: str = "sm_80") -> list[str]:
    """Return what `emulated_cases` prints for the works, under a version of Triton that `make test` has installed.

    The process is that of the last call if that had the same version and family.
    """
    environment = compiling(version)
    if (version, family) not in _running:
        _end()
        command = [sys.executable, str(Path(__file__).with_name("emulated_cases.py")), family]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _running[version, family] = subprocess.Popen(command, env=environment, text=True, **pipes)
    process = _running[version, family]
    try:
        print(json.dumps(works), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, f"emulated_cases.py ended with status {process.wait()}"
        return list(json.loads(answer))
    except BaseException:  # If the time is up, the process must not answer the next call.
        _end()
        raise


def _end() -> None:
    while _running:
        with _running.popitem()[1] as process:
            process.kill()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    _end()


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
        ("gluon", "", None),
        ("gluon", "", 0),
    ]
    assert results(*works) == [""] * len(works)
    fault = "a stage is released one product early"
    assert re.match(GLUON_FAULTS[fault], results(("gluon", fault, None))[0])


IN_USE = "SharedRace: .* (which another warp read|a wgmma or TMA store that nobody has waited for)"
# Versions of Triton order the instructions differently, and with them the faults that come first.
GLUON_FAULTS = {
    "no proxy fence before a TMA store": "SharedRace: .* no fence.proxy.async comes between",
    "a store's buffer is used too early": f"{IN_USE}|SharedRace: the program ends before this store has read",
    "sums are not waited for": f"WgmmaHazard: a register is accessed while|{IN_USE}",
    "a stage is released one product early": IN_USE,
    "a turn is not given": "Stuck: .* threads at an mbarrier that still needs 1 arrivals and 0 bytes",
    "too few bytes are expected": "SharedRace: .* an asynchronous copy that nobody|Stuck: .* -8192 bytes",
    "no fence after tensor maps": "SharedRace: .* no fence.proxy.async comes between",
}


@pytest.mark.compile
@pytest.mark.parametrize("version", [HERE, *OTHER_TRITONS])
def test_faults_of_specialized_warps_are_found(version: str) -> None:
    works = [("gluon", fault, seed) for fault in ["", *GLUON_FAULTS] for seed in (None, 0)]
    found = dict(zip(works, results(*works, version=version), strict=True))
    for (_, fault, seed), line in found.items():
        assert re.match(GLUON_FAULTS.get(fault, "$"), line), (fault, seed, line)


HANDED_OVER = "programs of one rank hand chunks over in memory that is not symmetric, whose order is not checked"
ENDED = "only programs of one rank count those that have ended"
# These are planted in the first rounds of protocols on two ranks, in each kernel or in one whose rounds are short. The
# compiler makes two kernels of a source, one of which knows that its rank is 1.
PLANTED_IN_PROTOCOLS = [
    ("collectives", "", "no release", 0, ""),
    ("collectives", "", "no acquire", 0, ""),
    ("collectives", "", "an acquire of the GPU alone", 0, ""),
    ("collectives", "all_to_all_forward_kernel", "a release of the GPU alone", 2, ENDED),
    ("collectives", "all_to_all_forward_kernel", "no barrier", 0, ""),
    ("all_gather_gemm", "", "no release", 1, HANDED_OVER),
    ("all_gather_gemm", "", "no acquire", 1, HANDED_OVER),
]


@pytest.mark.compile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "kernel", "mutation", "survivors", "reason"), PLANTED_IN_PROTOCOLS)
def test_planted_faults_of_a_protocol_are_found(
    name: str, kernel: str, mutation: str, survivors: int, reason: str
) -> None:
    *left, count = results(("planted_in_protocol", name, kernel, mutation))[0].split("\n")
    assert count != "0 mutants"
    assert len(left) == survivors, left


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "world", "dtype"), [("sm_80", 3, "float32"), ("sm_90", 2, "bfloat16")])
def test_protocols_hold_in_compiled_form(family: str, world: int, dtype: str) -> None:
    works = [("program", name, world, dtype, 2) for name in PROGRAMS]
    assert dict(zip(works, results(*works, family=family), strict=True)) == dict.fromkeys(works, "")


@pytest.mark.compile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_protocols_hold_in_every_execution_of_their_compiled_form(name: str) -> None:
    (report,) = results(("every_execution", name))
    print(f"{name}: {report}")
    assert re.fullmatch(r"2 ranks, \d+ executions?, all of them.*: no fault", report), report


DRAINED = "after its last loop the kernel does not use these places again"
OWN = "what is used next was used by nobody, by the same thread, or before another barrier"
JOINED = "the copies join the next group, for which the same wait waits"
UNUSED = "nobody uses these sums before the next wait, which waits for them too"
FETCHED = "the loop has two rounds, and copies for them begin before it"
# Read in the PTX of Triton 3.7.1. 3 barriers follow the making of a tensor map: it is made, copied, fenced and used by
# warp 0. 8 stand between mbarrier.arrive.expect_tx and the bulk copies, or between two of these: warp 0 executes them
# all, and another barrier orders mbarrier.init before the waits, and products before the copies that replace operands.
# 1 follows the wait at an mbarrier, where each warp has waited itself before its products read the tile.
FIRST_WARP = "warp 0 alone does what comes before and after 11 of them, and each warp itself what comes before 1"
REPLACED = "a tensor map begins as the one before, each of whose fields is replaced"
STORES = ("no store to shared memory", "another place in shared memory", "another place in global memory")
# (family, what runs, kernel, at most so many mutants) -> the mutations all of whose mutants are found, and for each
# other one how many mutants nothing finds, and why
PLANTED: dict[tuple[str, str, str, int], tuple[tuple[str, ...], dict[str, tuple[int, str]]]] = {
    # This product has tensor maps, wgmma and mbarriers.
    ("sm_90", "persistent gemm", "gemm_forward_kernel", 99): (
        ("no proxy fence", "no fence of a tensor map", "no fence of registers", "no wait for products",
         "a wait for one group of products less", "no commit of products", "no product", "no tile",
         "no bytes are expected", "no wait for a tile", "a wait for another phase", "no end of an mbarrier"),
        {"no barrier": (12, FIRST_WARP), "no store to shared memory": (1, REPLACED)},
    ),
    # Products read what cp.async has copied.
    ("sm_90", "attention", "attention_backward_dq_kernel", 8): (
        (),
        {"no proxy fence": (4, "another fence, or the end of the loop, comes before the next product"),
         "no fence of registers": (1, "its registers have not changed since the fence before"),
         "no wait for products": (1, UNUSED), "no commit of products": (1, UNUSED)},
    ),
    ("sm_80", "gemm", "gemm_forward_kernel", 8): (
        ("no barrier", "no wait for copies", "a wait for one group of copies less", "no copy", *STORES,
         "two registers of a product swapped", "two registers of a selection swapped"),
        {"no commit of copies": (1, JOINED)},
    ),
    ("sm_80", "attention", "attention_forward_kernel", 8): (
        (*STORES, "a shuffle that exchanges nothing", "two registers of a product swapped",
         "two registers of a selection swapped"),
        {"no barrier": (4, OWN), "no wait for copies": (1, DRAINED), "no copy": (1, FETCHED),
         "a wait for one group of copies less": (1, DRAINED), "no commit of copies": (2, JOINED)},
    ),
    ("sm_80", "attention", "attention_backward_dkdv_kernel", 6): (
        ("no barrier", "no commit of copies", "no copy", *STORES, "two registers of a product swapped",
         "two registers of a difference swapped"),
        {"no wait for copies": (1, DRAINED), "a wait for one group of copies less": (1, DRAINED)},
    ),
    **{
        ("sm_80", name, kernel, most): (
            ("no barrier", *STORES, "a shuffle that exchanges nothing", "two registers of a difference swapped"), {},
        )
        for name, kernel, most in (
            ("layer_norm", "norm_backward_kernel", 8), ("wide layer_norm", "norm_forward_kernel", 4)
        )
    },
}  # fmt: skip


@pytest.mark.compile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("family", "name", "kernel", "most"), PLANTED)
def test_planted_faults_are_found(family: str, name: str, kernel: str, most: int) -> None:
    """A mutant is found by a check or by a number that differs."""
    found, others = PLANTED[family, name, kernel, most]
    expected = dict.fromkeys(found, 0) | {mutation: count for mutation, (count, _) in others.items()}
    printed = results(*[("planted", name, kernel, mutation, most) for mutation in expected], family=family)
    left = {mutation: text.split("\n") for mutation, text in zip(expected, printed, strict=True)}
    assert "0 mutants" not in [lines.pop() for lines in left.values()]
    assert {mutation: len(lines) for mutation, lines in left.items()} == expected, left


def every_case() -> Iterator[Any]:
    """Yield a version of Triton, a family of GPUs and the works of `test_every_case_is_right`.

    Under the installed Triton each case runs on each family, in two of the three dtypes. The executor is the same under
    all versions. Another one adds what its compiler writes for a kernel: each operator's first case and every other one
    of the rest run on one family in one dtype. The dtypes, and there the families, differ between cases, versions and
    operators: each operator runs in each dtype.
    """
    described, dtypes = {name: operators.load(name).cases for name in operators.names()}, tuple(verify.DTYPES)
    for (turn, version), (place, family) in itertools.product(
        enumerate((HERE, *OTHER_TRITONS)), enumerate(("sm_80", "sm_90"))
    ):
        works: list[tuple[str, ...]] = []
        for number, (name, cases) in enumerate(described.items()):
            for i, case in enumerate(cases):
                if version == HERE:
                    works.append(("case", name, case.name, dtypes[(number + i + place) % 3]))
                elif (i == 0 or (i + turn) % 2 == 0) and (number + i // 2 + turn + place) % 2 == 0:
                    works.append(("case", name, case.name, dtypes[(number + i // 2 + turn + 1) % 3]))
        works += [("tutorials",)] * (family == "sm_80")
        yield pytest.param(version, family, works, id=f"{version}-{family}")


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("version", "family", "works"), [*every_case()])
def test_every_case_is_right(version: str, family: str, works: list[tuple[str, ...]]) -> None:
    found = results(*works, version=version, family=family)
    assert {work: wrong for work, wrong in zip(works, found, strict=True) if wrong} == {}


@pytest.mark.compile
def test_a_proxy_fence_that_the_compiler_leaves_out_is_found() -> None:
    """Triton 3.7.1 has no fence between cp.async and wgmma in the gradients of attention; 3.9.0 has it in each case."""
    (found,) = results(("as_compiled", "attention", "documents", "bfloat16"), version="3.7.1", family="sm_90")
    assert "no fence.proxy.async comes between" in found
