"""The machine that a process runs on: its identity, the CPU's name, and files that are kept for later runs.

The identity distinguishes ranks that can reach each other's memory from ranks that only have a network.
"""

import contextlib
import os
import platform
import uuid
from pathlib import Path


def processor() -> str:
    """Return the name of the CPU's model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return the folder `tpfuse` in the user's cache, for files that may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpfuse"


def replace_file(path: Path, text: str) -> None:
    """Replace the file `path` at once: readers see either the whole new text or the file that was there before.

    It writes a temporary file in the same folder, which it makes if needed, and renames it. Raise OSError, after
    which no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}")  # with the mode of any new file, which tempfile.mkstemp narrows
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def node_identity() -> str:
    """Return a text that is the same for all processes of one node.

    It names one boot of one kernel, one namespace of processes and one of networks. Namespaces belong to it because a
    container is a node of its own: its memory cannot be opened from another one. Network namespaces of one machine are
    also nodes of their own, so that tests can make two nodes of it. The last word is the node's own name, for messages;
    the words before it contain no blank.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = " ".join(str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "net"))
    return f"{boot} {namespaces} {os.uname().nodename}"


def different_names(one: str, other: str) -> tuple[str, str]:
    """Return names for two nodes by their identities, which differ; equal names are followed by what differs."""
    words, others = one.split(), other.split()
    if words[-1] != others[-1]:
        return words[-1], others[-1]
    apart = [(a, b) for a, b in zip(words, others, strict=True) if a != b]
    ours, theirs = (" ".join(column) for column in zip(*apart, strict=True))
    return f"{words[-1]} ({ours})", f"{others[-1]} ({theirs})"
