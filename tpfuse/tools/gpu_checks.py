"""The checks of `tpfuse doctor` on GPUs: driver, capability, links between pairs, multicast, MPS, clocks, profilers."""

import re
from collections.abc import Sequence
from itertools import combinations

from tpfuse.tools.machine import Finding, Gpu, Machine, Status

# These are bits of nvidia-smi's clocks_event_reasons.active (NVML API reference, NvmlClocksEventReasons).
_SLOWDOWNS = {
    0x02: "the application clocks are set lower than they could be",
    0x04: "the power limit is reached",
    0x08: "the hardware has slowed the clocks down",
    0x20: "the driver has slowed the clocks down because of the temperature",
    0x40: "the hardware has slowed the clocks down because of the temperature",
    0x80: "the power supply has slowed the clocks down",
}


def gpu_findings(machine: Machine) -> list[Finding]:
    """Returns the findings about GPUs, about the links between them, and about the profilers for them."""
    gpus = machine.gpus()
    found = [*_driver(machine), *_gpus(machine, gpus)]
    if gpus:
        found += [_compiler(machine), *_clocks(machine), *_mps(machine, len(gpus))]
    if len(gpus) > 1:
        found += [*_links(machine, gpus), _multicast(machine, len(gpus))]
    return [*found, _nsys(machine), _ncu(machine, bool(gpus))]


def _driver(machine: Machine) -> list[Finding]:
    text = machine.text("proc/driver/nvidia/version")
    module = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text or "")
    supported, built_for = machine.cuda_of_driver(), machine.built_for()
    if text is None and supported is None:
        return [Finding("GPUs", "ok", "There is no NVIDIA driver, so tpfuse runs on the CPU.")]
    name = f"The NVIDIA driver {module[1]}" if module else "The NVIDIA driver, whose version is unknown,"
    if supported is None:
        return [Finding("GPUs", "note", f"{name} does not say which version of CUDA it supports.")]
    cuda = f"{supported // 1000}.{supported % 1000 // 10}"
    if built_for is not None and supported // 1000 < int(built_for.split(".")[0]):
        reason = (
            f"{name} supports CUDA {cuda}, but torch is built for CUDA {built_for}, so every use of a GPU will fail"
        )
        return [Finding("GPUs", "fails", f"{reason}: update the driver, or install torch for CUDA {cuda}.")]
    return [Finding("GPUs", "ok", f"{name} supports CUDA {cuda}.")]


def _gpus(machine: Machine, gpus: Sequence[Gpu]) -> list[Finding]:
    if not gpus:
        if not machine.gpu_files():
            return [Finding("GPUs", "ok", "There is no GPU.")]
        if machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return [
                Finding("GPUs", "note", "CUDA_VISIBLE_DEVICES hides every GPU of this machine: unset it to use them.")
            ]
        return [Finding("GPUs", "fails", _unusable(machine))]
    found = []
    for number, gpu in enumerate(gpus):
        size, capability = f"{gpu.memory / 2**30:.1f} GiB", ".".join(map(str, gpu.capability))
        text = f"cuda:{number} is {gpu.name} with {size} and compute capability {capability}"
        if gpu.problem:
            advice = "hide this GPU with CUDA_VISIBLE_DEVICES, or give --kernels torch"
            found.append(Finding("GPUs", "fails", f"{text}. Triton kernels will fail: {gpu.problem}; {advice}."))
        else:
            found.append(Finding("GPUs", "ok", f"{text}."))
    if len({gpu.name for gpu in gpus}) > 1:
        found.append(Finding("GPUs", "note", "The GPUs are of several models, so the faster ones will wait."))
    return found


def _compiler(machine: Machine) -> Finding:
    """Returns the finding about what Triton needs to build the function that launches a kernel."""
    compiler = machine.environment.get("CC", "") or machine.program("gcc") or machine.program("clang")
    text = "so every Triton kernel will fail when it is launched for the first time"
    if not compiler:
        return Finding("software", "fails", f"There is no C compiler, {text}: install gcc, or name yours in CC.")
    if not machine.python_header():
        cure = "install the package of your system such as python3-dev"
        return Finding("software", "fails", f"The C header of Python (Python.h) is missing, {text}: {cure}.")
    return Finding("software", "ok", f"Triton builds its launchers with {compiler}.")


def _unusable(machine: Machine) -> str:
    text = "This machine has GPUs, but training on them will fail"
    if machine.built_for() is None:
        return f"{text}, because torch is built without CUDA: install a build of torch for CUDA."
    return f"{text}, because torch cannot use them: {machine.cuda_error() or 'the reason is unknown'}."


def _queried(machine: Machine, *properties: str) -> list[list[str]]:
    """Returns the properties of each GPU of the machine as nvidia-smi reports them; empty if it does not answer."""
    output = machine.output("nvidia-smi", f"--query-gpu={','.join(properties)}", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in (output or "").splitlines()]
    return [row for row in rows if len(row) == len(properties)]


def _clocks(machine: Machine) -> list[Finding]:
    # Drivers before release 535 know the property by its older name alone.
    names = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
    rows = next((rows for name in names if (rows := _queried(machine, "index", name))), [])
    found = []
    for index, word in rows:
        try:
            bits = int(word, 16)
        except ValueError:
            found.append(Finding("clocks", "note", f"The state of the clocks of GPU {index} is unknown."))
            continue
        reasons = [reason for bit, reason in _SLOWDOWNS.items() if bits & bit]
        if reasons:
            text = f"GPU {index} of nvidia-smi runs below its highest clocks, because {' and '.join(reasons)}."
            found.append(Finding("clocks", "note", f"{text} `nvidia-smi -q -d CLOCK,POWER,TEMPERATURE` shows more."))
    if not rows:
        found.append(Finding("clocks", "note", "The state of the clocks is unknown: nvidia-smi does not report it."))
    return found or [Finding("clocks", "ok", "Nothing slows down the clocks of the GPUs at this moment.")]


def _mps(machine: Machine, count: int) -> list[Finding]:
    states = {machine.mps(number) for number in range(count)}
    if True in states:
        text = "MPS runs. Ranks that share a GPU cannot share memory under it, and use NCCL or Gloo instead."
        return [Finding("MPS", "note", f"{text} `echo quit | nvidia-cuda-mps-control` ends it.")]
    if None in states:
        return [Finding("MPS", "note", "It is unknown whether MPS runs: the driver does not say.")]
    return [Finding("MPS", "ok", "MPS does not run.")]


def nvlinks(machine: Machine, gpus: Sequence[Gpu]) -> dict[tuple[int, int], str]:
    """Returns the connection of each pair of torch's GPUs in the words of `nvidia-smi topo -m`, such as NV18 or PHB.

    nvidia-smi counts all GPUs of the machine, and torch only the visible ones, so identifiers relate the two.
    """
    indices = {uuid.removeprefix("GPU-"): index for index, uuid in _queried(machine, "index", "uuid")}
    plain = re.sub(r"\x1b\[[\d;]*m", "", machine.output("nvidia-smi", "topo", "-m") or "")
    rows = [[word.strip() for word in line.split("\t")] for line in plain.splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    matrix = {
        (row[0], column): word
        for row in rows
        if row is not header and row[0].startswith("GPU")
        for column, word in zip(header[1:], row[1:], strict=False)
    }
    names = [f"GPU{indices.get(gpu.uuid.removeprefix('GPU-'), '?')}" for gpu in gpus]
    pairs = combinations(range(len(gpus)), 2)
    return {(a, b): matrix[names[a], names[b]] for a, b in pairs if (names[a], names[b]) in matrix}


def _links(machine: Machine, gpus: Sequence[Gpu]) -> list[Finding]:
    """Returns one finding for all pairs of GPUs that have the same abilities."""
    links = nvlinks(machine, gpus)
    groups: dict[tuple[bool, bool | None, str | None], list[tuple[int, int]]] = {}
    for a, b in combinations(range(len(gpus)), 2):
        abilities = machine.peer_access(a, b), machine.native_atomics(a, b), links.get((a, b))
        groups.setdefault(abilities, []).append((a, b))
    whole = len(groups) == 1 and len(gpus) > 2
    found = []
    for (peer, atomics, link), pairs in groups.items():
        names = ", ".join(f"cuda:{a} and cuda:{b}" for a, b in pairs)
        who = f"Each of the {len(pairs)} pairs of GPUs has" if whole else f"Between {names} there is"
        status, text = _ability(peer, atomics, link)
        found.append(Finding("links", status, f"{who} {text}"))
    return found


def _ability(peer: bool, atomics: bool | None, link: str | None) -> tuple[Status, str]:
    nvlink = re.fullmatch(r"NV(\d+)", link or "")
    way = "an unknown connection" if link is None else f"NVLink ({nvlink[1]} links)" if nvlink else f"PCIe ({link})"
    if not peer and nvlink:
        cure = "check the driver and, where there are NVSwitches, `systemctl status nvidia-fabricmanager`"
        return "fails", f"{way} but no peer access, so symmetric memory will fail and ranks use NCCL: {cure}."
    if not peer:
        return "note", f"{way} without peer access, so ranks use NCCL there instead of symmetric memory."
    if atomics is None:
        return "note", f"{way} with peer access, and it is unknown whether there are native atomic operations."
    if not atomics:
        reason = "signals could be lost, and ranks use NCCL there instead of symmetric memory"
        return "note", f"{way} with peer access but without native atomic operations, so {reason}."
    if link is None or not nvlink:
        return "note", f"{way} with peer access and native atomic operations; NVLink would be faster."
    return "ok", f"{way} with peer access and native atomic operations."


def _multicast(machine: Machine, count: int) -> Finding:
    answer = machine.multicast(count)
    if answer == "unknown":
        return Finding("links", "note", "It is unknown whether the GPUs support multicast: the driver does not say.")
    which = {"yes": "All GPUs support", "no": "No GPU supports"}.get(answer, f"Only {answer} can use")
    return Finding("links", "ok", f"{which} multicast, which tpfuse does not use yet.")


def _nsys(machine: Machine) -> Finding:
    program = machine.program("nsys")
    if program is None:
        return Finding("profilers", "note", "nsys is not installed, so Nsight Systems cannot record a timeline.")
    if machine.output(program, "--version") is None:
        return Finding("profilers", "note", "nsys is installed but cannot run: `nsys --version` fails.")
    paranoid = machine.text("proc/sys/kernel/perf_event_paranoid") or ""
    if paranoid.lstrip("-").isdigit() and int(paranoid) > 2 and not machine.privileged():
        cure = "`sudo sysctl kernel.perf_event_paranoid=2` allows it"
        return Finding("profilers", "note", f"nsys can run, but it cannot sample the CPU: {cure}.")
    return Finding("profilers", "ok", "nsys can run.")


def _ncu(machine: Machine, gpus: bool) -> Finding:
    program = machine.program("ncu")
    if program is None:
        return Finding("profilers", "note", "ncu is not installed, so Nsight Compute cannot measure kernels.")
    if machine.output(program, "--version") is None:
        return Finding("profilers", "note", "ncu is installed but cannot run: `ncu --version` fails.")
    if not gpus:
        return Finding("profilers", "ok", "ncu can run, but there is no GPU for it.")
    permitted = machine.counters_permitted()
    if permitted is None:
        return Finding("profilers", "note", "ncu can run; it is unknown whether it may read performance counters.")
    if not permitted:
        cure = "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run ncu as an administrator"
        return Finding("profilers", "note", f"ncu will fail with ERR_NVGPUCTRPERM when it reads counters: {cure}.")
    return Finding("profilers", "ok", "ncu can run and may read performance counters.")
