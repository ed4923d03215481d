"""The implementation that is chosen, and its reason, also for GPUs, which these tests do not need."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpfuse.choices import Implementation, Kernels
from tpfuse.comm import dispatch
from tpfuse.comm.dispatch import Choice
from tpfuse.comm.errors import Unavailable
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks

F32, F64 = torch.float32, torch.float64


class Group:
    """A replacement of a process group: a choice uses it only as a key."""


@pytest.fixture
def group() -> Any:
    return Group()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> object:
    """The memory by which every group is connected."""
    memory = object()
    monkeypatch.setattr(dispatch, "symmetric_memory", lambda *_: memory)
    return memory


ROWS = [  # device, dtype, implementation, kernels; what is taken, and why
    ("cpu", F32, "auto", "auto", "direct", "CPU ranks of one host"),
    ("cpu", F32, "auto", "torch", "direct", "CPU ranks of one host"),
    ("cpu", F32, "auto", "triton", "fused", "chosen by kernels triton"),
    ("cpu", F64, "auto", "triton", "direct", "there are no kernels for float64"),
    ("cpu", F32, "fused", "auto", "fused", "chosen"),
    ("cpu", F64, "fused", "auto", "direct", "there are no kernels for float64"),
    ("cpu", F32, "direct", "auto", "direct", "chosen"),
    ("cpu", F32, "direct", "triton", "direct", "chosen"),
    ("cpu", F32, "collective", "auto", "collective", "chosen"),
    ("cuda", F32, "auto", "auto", "collective", "nothing is measured yet"),
    ("cuda", F32, "auto", "triton", "fused", "chosen by kernels triton"),
    ("cuda", F32, "fused", "auto", "fused", "chosen"),
    ("cuda", F64, "fused", "auto", "collective", "there are no kernels for float64"),
    ("cuda", F32, "direct", "auto", "collective", "direct is for CPU ranks, not for cuda"),
]


def test_symmetric_memory_needs_a_group() -> None:
    with pytest.raises(ValueError, match=r"^symmetric_memory: group is None: expected a process group"):
        dispatch.symmetric_memory(None, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "dtype", "wanted", "kernel", "found", "reason"), ROWS)
def test_the_choice_for_each_device_dtype_and_switch(
    group: Any,
    memory: object,
    device: str,
    dtype: torch.dtype,
    wanted: Implementation,
    kernel: Kernels,
    found: str,
    reason: str,
) -> None:
    with use(implementation=wanted, kernels=kernel):
        made = dispatch.choose_implementation(torch.device(device), dtype, group)
    assert (made.implementation, made.reason) == (found, reason)
    assert made.memory is (None if found == "collective" else memory)
    assert (made.state == "fallback") == (wanted not in ("auto", found))


@pytest.mark.parametrize("wanted", ["auto", "fused", "direct"])
def test_ranks_that_share_no_memory_use_collective(
    group: Any, monkeypatch: pytest.MonkeyPatch, wanted: Implementation
) -> None:
    def connect(*_: object) -> None:
        raise Unavailable("ranks on hosts a and b")

    monkeypatch.setattr(dispatch, "symmetric_memory", connect)
    with use(implementation=wanted):
        made = dispatch.choose_implementation(torch.device("cpu"), F32, group)
    assert made == Choice("collective", "the ranks share no memory: ranks on hosts a and b", state="fallback")


@pytest.mark.parametrize(("wanted", "kernel"), [("fused", "auto"), ("auto", "triton")])
def test_fused_is_refused_on_cpus_if_kernels_are_not_interpreted(
    group: Any, memory: object, monkeypatch: pytest.MonkeyPatch, wanted: Implementation, kernel: Kernels
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with use(implementation=wanted, kernels=kernel):
        with pytest.raises(ValueError, match=r"interpreted: set TRITON_INTERPRET=1 before the program starts"):
            dispatch.choose_implementation(torch.device("cpu"), F32, group)
        assert dispatch.choose_implementation(torch.device("cuda"), F32, group).implementation == "fused"
    with use(implementation="direct"):
        assert dispatch.choose_implementation(torch.device("cpu"), F32, group).implementation == "direct"


def test_a_choice_is_made_once_for_each_group_and_switch(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(dispatch, "symmetric_memory", lambda group, device: asked.append((group, device.type)))
    cpu = torch.device("cpu")
    first = dispatch.choose_implementation(cpu, F32, group)
    assert dispatch.choose_implementation(cpu, F32, group) is first and asked == [(group, "cpu")]
    with use(implementation="fused"):
        assert dispatch.choose_implementation(cpu, F32, group).implementation == "fused"
    assert dispatch.choose_implementation(cpu, F32, group) is first
    other = Group()
    assert dispatch.choose_implementation(cpu, F32, other) is not first  # type: ignore[arg-type]
    assert asked[-1] == (other, "cpu")


def test_a_group_lives_no_longer_for_what_collective_made() -> None:
    objects, group = dispatch.Implementations(lambda group: [group]), Group()
    objects.of(Choice("collective", "chosen"), group)  # type: ignore[arg-type]
    alive = weakref.ref(group)
    del group
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("world", "backend"), [(1, "local"), (2, "shm")])
@on_ranks("world")
def test_every_implementation_of_a_group_has_the_same_memory(backend: str) -> None:
    group, found = dist.new_group(), []
    for name in ("fused", "direct", "auto"):
        with use(implementation=name):  # type: ignore[arg-type]
            found.append(dispatch.choose_implementation(torch.device("cpu"), torch.float32, group).memory)
    assert found[0] is found[1] is found[2] is not None and found[0].backend == backend
