"""The checks of `tpfuse doctor` on environment variables: those that slow tpfuse down or make it fail."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tpfuse.tools.machine import Finding, Machine

_PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")
# Other checks of the doctor, or tpfuse itself, have said what there is to say about these.
_KNOWN = {"CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
_ON = ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class _Rule:
    """A variable that may hurt. hurts: whether a value does; text: what then happens.

    only_gpus: whether the variable matters only where there are GPUs.
    """

    name: str
    hurts: Callable[[str], bool]
    text: str
    only_gpus: bool = True


def _set(value: str) -> bool:
    return value != ""


def _on(value: str) -> bool:
    return value.lower() in _ON


def _off(value: str) -> bool:
    return value == "0"


_RULES = (
    # A larger number does not hurt here: 1 alone puts the work of all streams into one queue.
    _Rule("CUDA_DEVICE_MAX_CONNECTIONS", lambda value: value == "1", "copies of shards do not overlap with products"),
    _Rule("CUDA_LAUNCH_BLOCKING", _on, "the host waits for every kernel, so nothing overlaps"),
    _Rule("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", _set, "each process gets only this part of a GPU's multiprocessors"),
    _Rule("NCCL_ALGO", _set, "NCCL uses only these algorithms, also where others are faster or needed"),
    _Rule("NCCL_PROTO", _set, "NCCL uses only these protocols, also where others are faster"),
    _Rule("NCCL_P2P_DISABLE", _on, "NCCL copies through the host instead of directly between GPUs"),
    _Rule("NCCL_P2P_LEVEL", _set, "NCCL copies directly only between GPUs that are this near to each other"),
    _Rule("NCCL_SHM_DISABLE", _on, "NCCL uses the network between GPUs without peer access"),
    _Rule("NCCL_IB_DISABLE", _on, "NCCL uses TCP between nodes, also where there is InfiniBand"),
    _Rule("NCCL_NVLS_ENABLE", _off, "NCCL does not let NVLink switches sum"),
    _Rule("NCCL_MAX_NCHANNELS", _set, "NCCL may not use more channels, which can limit its bandwidth"),
    _Rule("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "NCCL writes a log, which takes time"),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", _on, "the host waits for every collective, so nothing overlaps"),
    _Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _off,
        "a rank waits in NCCL for ever when another rank has ended, and the deadline does not end it",
    ),
    _Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        "torch compares all ranks before every collective, which takes time",
        only_gpus=False,
    ),
    _Rule(
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
        _on,
        "ranks on one GPU may share memory, and kernels that wait for each other may then not run side by side",
    ),
    _Rule("TRITON_INTERPRET", _on, "Triton interprets every kernel on the host, which takes very long"),
    *(
        _Rule(
            name,
            lambda value: "expandable_segments:false" in value.lower().replace(" ", ""),
            "torch's allocator loses memory to fragmentation; `tpfuse train` turns expandable segments on again",
        )
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ),
)


def environment_findings(machine: Machine) -> list[Finding]:
    """Returns the findings about environment variables."""
    found = [*_hurting(machine), *_workspace(machine), *_interfaces(machine)]
    hurting = {finding.text.partition("=")[0] for finding in found}
    others = [
        f"{name}={value}"
        for name, value in sorted(machine.environment.items())
        if name.startswith(_PREFIXES) and name not in hurting | _KNOWN
    ]
    if others:
        found.append(Finding("environment", "ok", f"These settings are not known to hurt here: {', '.join(others)}."))
    return found or [Finding("environment", "ok", "No setting in the environment is known to hurt.")]


def _hurting(machine: Machine) -> Iterator[Finding]:
    gpus = bool(machine.gpus())
    for rule in _RULES:
        value = machine.environment.get(rule.name)
        if value is not None and rule.hurts(value) and (gpus or not rule.only_gpus):
            text = f"{rule.name}={value} hurts: {rule.text}; unset {rule.name}."
            yield Finding("environment", "note", text)
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        present, count = len(machine.gpu_files()), len(machine.gpus())
        of = f"{count} of {present} GPUs" if present else f"{count} GPUs"
        yield Finding(
            "environment",
            "note" if count < present else "ok",
            f"CUDA_VISIBLE_DEVICES={visible} shows {of} to this process.",
        )


def _workspace(machine: Machine) -> Iterator[Finding]:
    value = machine.environment.get("CUBLAS_WORKSPACE_CONFIG")
    if value is not None and value not in (":4096:8", ":16:8") and machine.gpus():
        text = f"CUBLAS_WORKSPACE_CONFIG={value} will make --train.deterministic fail, and repeated runs may differ"
        yield Finding("environment", "fails", f"{text}: unset it, and tpfuse sets :4096:8.")


def _interfaces(machine: Machine) -> Iterator[Finding]:
    names = machine.environment.get("GLOO_SOCKET_IFNAME", "")
    present = machine.names("sys/class/net")
    missing = [name for name in names.split(",") if name and name not in present]
    if missing and present:
        text = f"GLOO_SOCKET_IFNAME={names} names {missing[0]}, which does not exist, so Gloo will fail"
        yield Finding("environment", "fails", f"{text}: choose from {', '.join(present)}, or unset it.")
