"""What keeps a profiler from recording is one sentence that says what to do, before a program runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tpfuse.profile import preflight
from tpfuse.train.errors import UserError
from tpfuse.train.host import Host

NSYS = "NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0\n"
NCU = (
    "NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright (c) 2018-2026 NVIDIA Corporation\nVersion 2026.1.1.0\n"
)
HELP = "  --lockstep-kernel-launch   x\n  --communicator-tcp-num-peers arg   y\n"
NO_RIGHTS, ADMINISTRATOR = "CapEff:\t0000000000000000", "CapEff:\t0000000000200000"
StandIn = Callable[..., Path]
Tool = Callable[[Host], str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns the root of a machine with a GPU, whose counters every user may read."""
    files = {
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "proc/driver/nvidia/params": "RmLogonRC: 1\nRmProfilingAdminOnly: 0\n",
        "proc/self/status": NO_RIGHTS,
        "proc/1/comm": "systemd",
    }
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


@pytest.fixture
def tools(stand_in: StandIn) -> dict[str, Path]:
    """Returns the paths of stand-ins for both tools, which are on PATH."""
    return {
        "nsys": stand_in("nsys", {"--version": NSYS}),
        "ncu": stand_in("ncu", {"--version": NCU, "--help": HELP}),
    }


both = pytest.mark.parametrize(("name", "check"), [("nsys", preflight.nsys), ("ncu", preflight.ncu)])


@both
def test_the_path_of_a_tool_that_can_record(name: str, check: Tool, root: Path, tools: dict[str, Path]) -> None:
    assert check(Host(root)) == str(tools[name])


@both
def test_a_machine_without_gpus(name: str, check: Tool, root: Path, tools: dict[str, Path]) -> None:
    (root / "dev/nvidia0").unlink()
    with pytest.raises(UserError, match=f"{name} records GPUs, and there is none here"):
        check(Host(root))


@both
def test_a_missing_tool(name: str, check: Tool, root: Path) -> None:
    with pytest.raises(UserError, match=rf"{name} is neither on PATH nor in .*: install Nsight \w+ 20\d\d.1 or newer"):
        check(Host(root, {"PATH": "/nowhere"}))


@both
@pytest.mark.parametrize("folder", ["usr/local/cuda/bin", "opt/nvidia/nsight-systems/2025.3.1/bin"])
def test_tools_are_also_found_where_cuda_installs_them(
    name: str, check: Tool, folder: str, root: Path, tools: dict[str, Path]
) -> None:
    folder = folder.replace("systems/2025.3.1/bin", "compute/2025.3.1") if name == "ncu" else folder
    older = root / folder.replace("2025.3.1", "2024.1.1")
    for place in dict.fromkeys((older, root / folder)):
        place.mkdir(parents=True)
        (place / name).symlink_to(tools[name])
    assert check(Host(root, {"PATH": "/nowhere"})) == str(root / folder / name)


@both
def test_an_old_tool(name: str, check: Tool, root: Path, stand_in: StandIn) -> None:
    old = stand_in(name, {"--version": "Copyright (c) 2018-2030\nVersion 2019.5.3"})
    with pytest.raises(UserError, match=rf"{old} is Nsight \w+ 2019.5, which is too old: install version 20"):
        check(Host(root))


@both
@pytest.mark.parametrize(("said", "status", "reason"), [("", 1, "fails"), ("hello", 0, "names no version")])
def test_a_damaged_tool(
    name: str, check: Tool, root: Path, stand_in: StandIn, said: str, status: int, reason: str
) -> None:
    stand_in(name, {"--version": said}, status=status)
    with pytest.raises(UserError, match=f"--version` {reason}: install"):
        check(Host(root))


@both
@pytest.mark.parametrize("variable", ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_another_profiler(
    name: str, check: Tool, root: Path, tools: dict[str, Path], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    reason = rf"another profiler is attached to this process \({variable} is set\)"
    with pytest.raises(UserError, match=reason):
        check(Host(root))
    with pytest.raises(UserError, match=reason):
        preflight.torch_profiler(Host(root))


def test_torch_records_cpus_under_another_profiler(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.torch_profiler(Host(root))
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "1")
    with pytest.raises(UserError, match="another profiler"):
        preflight.torch_profiler(Host(root))
    (root / "dev/nvidia0").unlink()
    preflight.torch_profiler(Host(root))


def test_counters_for_administrators_only(root: Path, tools: dict[str, Path]) -> None:
    (root / "proc/driver/nvidia/params").write_text("RmLogonRC: 1\nRmProfilingAdminOnly: 1\n")
    with pytest.raises(UserError, match="ERR_NVGPUCTRPERM: load the driver with NVreg_RestrictProfilingToAdminUsers=0"):
        preflight.ncu(Host(root))
    assert preflight.nsys(Host(root))  # it reads no counters
    (root / "proc/self/status").write_text(ADMINISTRATOR)
    assert preflight.ncu(Host(root))
    (root / "proc/self/status").write_text(NO_RIGHTS)
    (root / "proc/driver/nvidia/params").unlink()  # unknown: ncu will say it
    assert preflight.ncu(Host(root))


@pytest.mark.parametrize("missing", ["--lockstep-kernel-launch", "--communicator-tcp-num-peers"])
def test_ncu_without_lockstep(missing: str, root: Path, tools: dict[str, Path], stand_in: StandIn) -> None:
    assert preflight.ncu(Host(root), lockstep=True) == str(tools["ncu"])
    stand_in("ncu", {"--version": NCU, "--help": HELP.replace(missing, "--other")})
    assert preflight.ncu(Host(root)) == str(tools["ncu"])
    with pytest.raises(UserError, match=r"has no option .*: install a newer Nsight Compute, 2026\.1"):
        preflight.ncu(Host(root), lockstep=True)


def test_dcgm_is_a_warning(root: Path, tools: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    preflight.ncu(Host(root))
    assert capsys.readouterr().err == ""
    (root / "proc/1/comm").write_text("nv-hostengine\n")
    preflight.ncu(Host(root))
    assert "`dcgmi profile --pause`" in capsys.readouterr().err
