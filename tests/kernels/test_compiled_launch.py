"""Launches without Triton's binder: they start what Triton itself would start, with the same arguments.

`compare_launches` compares them with Triton's own, for the operators' kernels and with one argument after another
changed. The other tests launch a kernel that is a stand-in, with a stand-in for the driver of a machine with several
devices: what is faked is all that Triton would compile and start, what is real is the choice of what is started.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from tests.support.compilations import OTHER_TRITONS, compiling
from tests.support.tiers import exhaustive
from tpfuse.kernels import compiled_launch, configurations
from tpfuse.kernels import launch as launching
from tpfuse.kernels.launch import Launch, launch, planned, recording
from tpfuse.tools import operators as cases

EVERY = cases.names()


@pytest.mark.parametrize(
    ("version", "operators"),
    [
        (triton.__version__, ("gemm", "gemm_reduce_scatter", "all_gather_gemm")),
        *exhaustive(*((version, EVERY) for version in (triton.__version__, *OTHER_TRITONS))),
    ],
)
def test_launches_are_those_of_triton(version: str, operators: tuple[str, ...]) -> None:
    script = Path(__file__).with_name("compare_launches.py")
    command = [sys.executable, str(script), *operators]
    done = subprocess.run(command, env=compiling(version), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["triton"] == version and report["wrong"] == []
    assert len(report["kernels"]) >= len(operators) and min(report["kernels"].values()) > 50


class _Compiled(CompiledKernel):
    """A stand-in for a compiler's result. started: the devices, grids and arguments with which it was started."""

    def __init__(self, started: list[tuple[Any, ...]], driver: "_Driver") -> None:
        self.module, self.function, self.packed_metadata = None, 1, (4, 1, 0)
        self.metadata = SimpleNamespace(global_scratch_size=0)
        self._started, self._driver = started, driver

    @property
    def run(self) -> Callable[..., None]:
        def note(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            self._started.append((self._driver.device, (x, y, z), stream, rest[5:]))

        return note


class _Parameter:
    def __init__(self, name: str) -> None:
        self.name, self.is_constexpr, self.do_not_specialize = name, name.isupper(), name == "rank"


class _Driver:
    """A driver of a machine with several devices, one of which is the current one."""

    device = -1  # the device of CPU tensors

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return 100 + device


class _Kernel:
    """A kernel whose launches by Triton are counted."""

    arg_names = ("x_ptr", "y_ptr", "stride", "rank", "scale", "BLOCK")

    def __init__(self, driver: _Driver) -> None:
        self.params = [_Parameter(name) for name in self.arg_names]
        self.pre_run_hooks: list[Any] = []
        self.driver, self.through_triton = driver, 0
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Compiled]:
        def run(**arguments: Any) -> _Compiled:
            self.through_triton += 1
            return _Compiled(self.started, self.driver)

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kernel]:
    """Yield a kernel that is launched as on a GPU."""
    driver = _Driver()
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "device", _device(driver))
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: _device(driver)(x.get_device()))
    yield _Kernel(driver)
    launching.forget_plans()


def _device(driver: _Driver) -> Any:
    @contextlib.contextmanager
    def current(device: int) -> Iterator[None]:
        before, driver.device = driver.device, device
        yield
        driver.device = before

    return current


class _On(Tensor):
    """A tensor that says which device it is on."""

    number = -1

    def get_device(self) -> int:
        return self.number


def _on(device: int) -> Tensor:
    x = torch.empty(32).as_subclass(_On)
    x.number = device
    return x


ARGUMENTS: dict[str, Any] = {
    "x_ptr": torch.empty(32), "y_ptr": None, "stride": 32, "rank": 1, "scale": 0.5, "BLOCK": 64,
}  # fmt: skip


def test_a_kernel_is_started_on_the_device_of_its_tensors(kernel: _Kernel) -> None:
    for device in (2, 2, -1, -1, 2):
        launch(kernel, (1,), num_warps=4, num_stages=2, **(ARGUMENTS | {"x_ptr": _on(device)}))
    assert [device for device, *_ in kernel.started] == [2, -1, 2]
    assert kernel.driver.device == -1


def test_profilers_are_told_of_launches(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profilers are told by Triton's own path. Kernels compiled for them are not kept."""

    def run() -> None:
        launch(kernel, (1,), num_warps=4, num_stages=2, **ARGUMENTS)

    kernel.pre_run_hooks.append(lambda: None)
    run()
    kernel.pre_run_hooks.clear()
    run()
    assert (kernel.through_triton, len(kernel.started)) == (2, 0)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(print)
        run()
        hook.remove(print)
    assert (kernel.through_triton, len(kernel.started)) == (4, 0)
    run()
    assert (kernel.through_triton, len(kernel.started)) == (4, 1)


def test_tables_are_bounded(kernel: _Kernel) -> None:
    for stride in range(2 * compiled_launch.MOST_KEPT + 1):
        launch(kernel, (1,), num_warps=4, num_stages=2, **(ARGUMENTS | {"stride": stride}))
    (form,) = compiled_launch._kernels[id(kernel)].forms.values()
    assert 0 < len(form.started) <= compiled_launch.MOST_KEPT


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_traced_launch_is_compiled_apart(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch, is_planned: bool) -> None:
    """Launch of a trace start another compiled kernel, each with its own rows; launches after it start the first."""
    monkeypatch.setattr(kernel, "arg_names", (*kernel.arg_names, "abort_ptr", "trace_ptr"))
    kernel.params += [_Parameter("abort_ptr"), _Parameter("trace_ptr")]
    given = {**ARGUMENTS, "abort_ptr": torch.zeros(1, dtype=torch.int32), "trace_ptr": None}
    plan = Launch(kernel, (3,), {name: x for name, x in given.items() if name[:2] not in ("x_", "y_")}, 4, 2)

    def run() -> object:
        if is_planned:
            plan.run(x_ptr=given["x_ptr"], y_ptr=None)
        else:
            launch(kernel, (3,), num_warps=4, num_stages=2, **given)
        return kernel.started[-1][-1][-1] if kernel.started else None

    rows = [torch.empty(3, 5, dtype=torch.int64) for _ in range(3)]
    run()
    assert run() is None and kernel.through_triton == 1
    left = iter(rows)
    launching.start_trace(lambda *_: next(left))
    try:
        run()
        assert kernel.through_triton == 2, "it is compiled for rows"
        assert run() is rows[1] and run() is rows[2] and kernel.through_triton == 2
    finally:
        launching.stop_trace()
    assert run() is None and kernel.through_triton == 2
    assert [values[-1] is None for *_, values in kernel.started] == [True, False, False, True]


def _planned() -> tuple[Any, list[tuple[Any, ...]]]:
    seen: list[tuple[Any, ...]] = []

    @planned
    def plan(x: Tensor, y: Tensor | None, flag: bool) -> int:
        if x.ndim == 0:
            raise ValueError("no rows")
        seen.append((x, y, flag))
        return len(seen)

    return plan, seen


@pytest.mark.parametrize(
    ("change", "planned_again"),
    [({}, False), ({"x": torch.zeros(4, 8)}, False), ({"x": torch.empty(4, 8, device="meta")}, True)],
    ids=["same tensors", "other tensors", "another device"],
)
def test_a_layout_is_planned_once(kernel: _Kernel, change: dict[str, Any], planned_again: bool) -> None:
    """That all of a layout counts is in `compare_launches`."""
    plan, seen = _planned()
    first: dict[str, Any] = {"x": torch.empty(4, 8), "y": None, "flag": False}
    assert plan(*first.values()) == plan(*first.values()) == 1
    other = first | change
    assert plan(*other.values()) == plan(*other.values()) == len(seen) == 1 + planned_again
    assert plan(*first.values()) == 1


def test_tensors_without_a_layout_are_planned_each_time(kernel: _Kernel) -> None:
    plan, seen = _planned()
    plan(torch.empty(4, 8), None, False)
    given = [torch.empty(4, 8).as_subclass(_On), torch.empty(4, 8).to_sparse(), torch.eye(4).to_sparse_csr()]
    torch.func.vmap(lambda x: given.append(x) or x)(torch.empty(3, 4, 8))
    for number, x in enumerate(given):
        assert (plan(x, None, False), plan(x, None, False)) == (2 * number + 2, 2 * number + 3)
    assert len(seen) == 1 + 2 * len(given)


def test_autocast_and_deterministic_algorithms_have_plans_of_their_own(kernel: _Kernel) -> None:
    plan, _ = _planned()
    call = torch.empty(4, 8), None, False
    assert plan(*call) == 1
    for number, dtype in ((2, torch.bfloat16), (3, torch.float16), (2, torch.bfloat16)):
        with torch.autocast("cpu", dtype=dtype):
            assert plan(*call) == plan(*call) == number
    torch.use_deterministic_algorithms(False)
    try:
        assert plan(*call) == 4
    finally:
        torch.use_deterministic_algorithms(True)
    assert plan(*call) == 1


def test_a_plan_refuses_again_what_it_has_refused(kernel: _Kernel) -> None:
    plan, _ = _planned()
    for _ in range(2):
        with pytest.raises(ValueError, match="no rows"):
            plan(torch.tensor(1.0), None, False)


def test_plans_are_made_again(kernel: _Kernel) -> None:
    """Plans are made again for other rows of the table, and for launches that are recorded for another GPU."""
    plan, seen = _planned()
    call = torch.empty(4, 8), None, False
    plan(*call)
    with configurations.override():
        assert plan(*call) == plan(*call) == 2
    assert plan(*call) == plan(*call) == 3
    configurations.forget()
    assert plan(*call) == 4
    for family, number in (("sm_90", 5), ("sm_80", 6), ("sm_90", 5)):
        with recording(family):
            assert plan(*call) == plan(*call) == number
    assert plan(*call) == 4
    for rows in range(compiled_launch.MOST_KEPT + 1):
        plan(torch.empty(rows, 1), None, False)
    assert len(seen) == 6 + compiled_launch.MOST_KEPT + 1
