"""The checks of `tpfuse doctor` on the host: versions, shared memory, limits of processes, cores and NUMA nodes."""

import re
import resource
from collections.abc import Iterator

from tpfuse.kernels.launch import interpreter_problem
from tpfuse.tools.machine import Finding, Machine

_OLDEST_TORCH, _OLDEST_TRITON = (2, 11), (3, 6)  # pyproject.toml requires them
# The Triton of each torch, for builds of torch that do not require one. pyproject.toml lists the same pairs.
_TRITON_OF_TORCH: dict[tuple[int, ...], str] = {(2, 11): "3.6.0", (2, 12): "3.7.1", (2, 13): "3.7.1", (2, 15): "3.9.0"}
# NCCL's message "Error while creating shared memory segment" names this size for each connection (NVIDIA/nccl#290).
_NCCL_SEGMENT = 9637888
# CPU runs of `tpfuse train` with 2 ranks failed with 18 open files and worked with 24, with 4 ranks 24 and 32.
_FILES, _FILES_OF_A_RANK = 16, 4
_USUAL_FILES = 1024  # the soft limit of most distributions


def host_findings(machine: Machine, ranks: int) -> list[Finding]:
    """Returns the findings about the host. ranks: the number of ranks that a run here may well have."""
    return [
        *_software(machine),
        *_communication(machine),
        *_memory(machine),
        *_limits(machine, ranks),
        *_cores(machine),
        *_numa(machine),
    ]


def _release(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _software(machine: Machine) -> Iterator[Finding]:
    torch, triton, built_for = machine.version("torch"), machine.version("triton"), machine.built_for()
    build = f"built for CUDA {built_for}" if built_for else "built for CPUs only"
    yield Finding("software", "ok", f"Python is {machine.version('python')}.")
    if _release(torch) < _OLDEST_TORCH:
        text = f"torch {torch} is older than 2.11, so symmetric memory and the layers will fail"
        yield Finding("software", "fails", f"{text}: pip install 'torch>=2.11'.")
    else:
        yield Finding("software", "ok", f"torch is {torch}, {build}.")
    pair = machine.pinned_triton() or _TRITON_OF_TORCH.get(_release(torch))
    if _release(triton) < _OLDEST_TRITON:
        text = f"Triton {triton} is older than 3.6, so the kernels will fail"
        yield Finding("software", "fails", f"{text}: pip install triton=={pair or '3.6.0'}.")
    elif pair is None:
        yield Finding("software", "note", f"Triton is {triton}. It is unknown which one belongs to torch {torch}.")
    elif _release(triton) != _release(pair):
        text = f"Triton is {triton}, but {pair} belongs to torch {torch}. torch.compile and the kernels may fail"
        yield Finding("software", "note", f"{text}: pip install triton=={pair}.")
    else:
        yield Finding("software", "ok", f"Triton is {triton}, which belongs to this torch.")
    if problem := interpreter_problem(triton, machine.version("numpy")):
        text = "Kernels cannot be interpreted, so `tpfuse verify` without a GPU will fail"
        yield Finding("software", "note" if machine.gpus() else "fails", f"{text}: {problem}.")


def _communication(machine: Machine) -> Iterator[Finding]:
    nccl = machine.nccl()
    if nccl is not None:
        yield Finding("communication", "ok", f"NCCL is {nccl}.")
    elif len(machine.gpus()) > 1:
        text = "torch has no NCCL, so every run on several GPUs will fail: install a build of torch with NCCL"
        yield Finding("communication", "fails", f"{text}.")
    else:
        yield Finding("communication", "ok", "torch has no NCCL, which only runs on several GPUs need.")
    if not machine.gloo():
        text = "torch has no Gloo, so every run on several CPU ranks will fail: install a build of torch with Gloo"
        yield Finding("communication", "fails", f"{text}.")
    if problem := machine.shared_memory():
        text = f"Processes cannot share anonymous memory ({problem}), so `tpfuse train` on several ranks will fail"
        cure = "let the container or sandbox permit memfd_create and /proc/PID/fd"
        yield Finding("communication", "fails", f"{text}: {cure}.")
    else:
        yield Finding(
            "communication", "ok", "Processes can share anonymous memory, through which ranks watch each other."
        )
    if problem := machine.process_descriptors():
        text = f"pidfd_open does not work ({problem}), so ranks notice later that another rank was killed"
        yield Finding("communication", "note", f"{text}: let the container or sandbox permit it.")


def _memory(machine: Machine) -> Iterator[Finding]:
    available = machine.available_memory()
    if available is None:
        yield Finding("memory", "note", "It is unknown how much memory is available.")
    else:
        yield Finding("memory", "ok", f"{available / 2**30:.1f} GiB of memory are available.")
    ranks, space = len(machine.gpus()), machine.space("dev/shm")
    if space is None or not machine.writable("dev/shm"):
        if ranks < 2:
            text = "/dev/shm does not exist or cannot be written. tpfuse does not need it here, but other programs may"
            yield Finding("memory", "note", f"{text}.")
            return
        text = "/dev/shm does not exist or cannot be written, so NCCL will fail where it needs shared memory"
        yield Finding("memory", "fails", f"{text}: mount it with `mount -t tmpfs -o mode=1777 tmpfs /dev/shm`.")
        return
    size, free = (f"{count / 2**20:.0f} MiB" for count in space)
    if ranks < 2:
        text = f"/dev/shm has {free} free of {size}, which does not matter: CPU ranks use anonymous memory instead"
        yield Finding("memory", "ok", f"{text}.")
    elif space[1] < ranks * _NCCL_SEGMENT:
        text = (
            f"/dev/shm has {free} free of {size}. NCCL takes about 10 MiB for each of the {ranks} ranks and will fail"
        )
        yield Finding("memory", "fails", f"{text}: delete old files there, or give the container --shm-size=1g.")
    else:
        yield Finding("memory", "ok", f"/dev/shm has {free} free of {size}, which only NCCL uses.")


def _limits(machine: Machine, ranks: int) -> Iterator[Finding]:
    files, needed = machine.limit(resource.RLIMIT_NOFILE), _FILES + _FILES_OF_A_RANK * ranks
    if files is None or files >= max(needed, _USUAL_FILES):
        yield Finding("limits", "ok", f"A process may open {'any number of' if files is None else files} files.")
    elif files < needed:
        text = f"A process may open {files} files, but each of {ranks} ranks needs about {needed} and will fail"
        yield Finding("limits", "fails", f"{text}: ulimit -n 4096.")
    else:
        text = f"A process may open only {files} files. Runs on many ranks or with many files of data need more"
        yield Finding("limits", "note", f"{text}: ulimit -n 4096.")
    locked, adapters = machine.limit(resource.RLIMIT_MEMLOCK), machine.names("sys/class/infiniband")
    if locked is None or not adapters:
        which = "any amount of" if locked is None else f"{locked / 2**20:.0f} MiB of"
        text = "." if adapters else ", and there is no InfiniBand adapter that needs more."
        yield Finding("limits", "ok", f"A process may lock {which} memory{text}")
    else:
        text = f"A process may lock only {locked / 2**20:.0f} MiB of memory, so NCCL may fail over {adapters[0]}"
        yield Finding("limits", "note", f"{text}: ulimit -l unlimited, or --ulimit memlock=-1 for a container.")


def _cores(machine: Machine) -> Iterator[Finding]:
    cores, usable, share = machine.cores(), len(machine.usable_cores()), machine.time_limit()
    if usable < cores:
        text = f"This process may use {usable} of the {cores} logical cores. Ranks that it starts share these"
        yield Finding("CPU", "note", f"{text}: `taskset -cp $$` shows them.")
    else:
        yield Finding("CPU", "ok", f"This process may use all {cores} logical cores.")
    if share is not None and share < usable:
        text = f"The control group may use the time of {share:g} cores, and threads on more of them are paused"
        yield Finding("CPU", "note", f"{text}: set OMP_NUM_THREADS to {max(1, int(share))} divided by the ranks.")
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable:
        text = f"OMP_NUM_THREADS={threads} is more than the number of usable cores, {usable}, so threads take turns"
        yield Finding("CPU", "note", f"{text}: set it to {usable} divided by the number of ranks.")
    elif not threads and usable > 8:
        text = f"OMP_NUM_THREADS is not set, so each rank that torchrun does not start takes {usable} threads"
        yield Finding("CPU", "note", f"{text}: set it to {usable} divided by the ranks. `tpfuse train` does so itself.")


def _numbers(text: str) -> set[int]:
    """Returns the numbers in a list of the kernel, such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _numa(machine: Machine) -> Iterator[Finding]:
    folders = [name for name in machine.names("sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    cores = {int(name[4:]): _numbers(machine.text(f"sys/devices/system/node/{name}/cpulist") or "") for name in folders}
    used = sorted(node for node, numbers in cores.items() if numbers & machine.usable_cores())
    if not folders:
        yield Finding("CPU", "note", "The NUMA nodes of this machine are unknown.")
    elif len(cores) == 1:
        yield Finding("CPU", "ok", "There is one NUMA node.")
    elif len(used) > 1:
        text = f"This process may run on {len(used)} of {len(cores)} NUMA nodes, and ranks slow down on the wrong one"
        yield Finding("CPU", "note", f"{text}: start them with `torchrun --numa-binding=node`.")
    else:
        yield from _bound(machine, used, len(cores))


def _bound(machine: Machine, used: list[int], count: int) -> Iterator[Finding]:
    """Yields the finding about a process that may run on one NUMA node only."""
    names = machine.names("proc/driver/nvidia/gpus") if machine.gpus() else []
    answers = (machine.text(f"sys/bus/pci/devices/{name}/numa_node") for name in names)
    nodes = {int(answer) for answer in answers if answer is not None and answer.isdigit()}
    text = f"This process is bound to NUMA node {', '.join(map(str, used))} of {count}"
    far = sorted(nodes - set(used))
    if far:
        yield Finding("CPU", "note", f"{text}, but there are GPUs on node {', '.join(map(str, far))}: bind each rank.")
    else:
        yield Finding("CPU", "ok", f"{text}.")
