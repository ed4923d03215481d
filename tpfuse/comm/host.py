"""Where a process runs: what tells ranks that reach each other's memory from ranks that only have a network.

And what a process finds and keeps there: the CPU's name, and files for later runs.
"""

import contextlib
import os
import platform
import tempfile
from pathlib import Path


def processor() -> str:
    """The name of the CPU's model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """The folder `tpfuse` in the user's cache, for what may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpfuse"


def replace_file(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it, so that readers see all of it or what was there before.

    Makes its folder. Raises OSError, and then leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def node_identity() -> str:
    """The same for the processes of one node: one boot of one kernel, one namespace of processes and one of networks.

    Namespaces as well, because a container is a node of its own: its memory cannot be opened from another one. So are
    the network namespaces of one machine, which makes two nodes of it for tests. Last comes the name that the node
    gives itself, for messages; no other part has a blank.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = " ".join(str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "net"))
    return f"{boot} {namespaces} {os.uname().nodename}"


def different_names(one: str, other: str) -> tuple[str, str]:
    """Two identities that differ, in words: their names, with the namespaces that differ where the names are alike."""
    words, others = one.split(), other.split()
    if words[-1] != others[-1]:
        return words[-1], others[-1]
    apart = [(a, b) for a, b in zip(words, others, strict=True) if a != b]
    ours, theirs = (" ".join(column) for column in zip(*apart, strict=True))
    return f"{words[-1]} ({ours})", f"{others[-1]} ({theirs})"
