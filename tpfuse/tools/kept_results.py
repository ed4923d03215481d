"""Results of compilations, stored under a digest of all that they depend on, so that only changed kernels are compiled.

A digest covers the kernel's source and that of every function it calls, the types and constants of the launch, the
options, Triton itself, the version of ptxas, the environment variables that Triton reads, and the source of the code
that reads the figures from a compiled kernel. An entry therefore never becomes wrong, and checkouts share one folder:
by default `tpfuse/compiled` in the user's cache, which survives `make clean` and may be deleted at any time.

Each entry is a file that begins with the checksum of the rest of the file. It is written under a temporary name in the
same folder and then renamed, so that processes that write at the same time do no harm. An entry whose checksum is wrong
counts as missing. Errors are not stored, because some do not occur again (for example, lack of memory).
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key

from tpfuse.comm.host import cache_folder, replace_file
from tpfuse.tools import resources, sass, wgmma_hazards
from tpfuse.tools.recorded import Job, target
from tpfuse.tools.resources import Compilation


def default_folder() -> Path:
    """Return the folder in which results are kept unless the caller gives another one."""
    return cache_folder() / "compiled"


@cache
def _reader() -> str:
    """Return the digest of the code that makes a Compilation from a compiled kernel."""
    files = resources.__file__, sass.__file__, wgmma_hazards.__file__
    return hashlib.sha256(b"".join(Path(str(file)).read_bytes() for file in files)).hexdigest()


def digest(job: Job) -> str:
    """Return the digest of a job. It is equal for jobs whose results differ at most in the operator and the dtype."""
    backend = make_backend(target(job.family))
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    key = get_cache_key(job.source, backend, options, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(f"{_reader()}-{job.family}-{key}".encode()).hexdigest()


def entry(document: dict[str, Any]) -> Compilation:
    """Return the Compilation with the fields of a JSON document, in which the widths are strings."""
    widths = {name: {int(width): count for width, count in document[name].items()} for name in ("loads", "stores")}
    return Compilation(**document | widths)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class KeptResults:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Compilation | None:
        """Return the result with the digest `name`, or None if there is no intact one."""
        try:
            checksum, _, text = (self.folder / name).read_text(encoding="utf-8").partition("\n")
        except (OSError, UnicodeDecodeError):
            return None
        return entry(json.loads(text)) if checksum == _checksum(text) else None

    def write(self, name: str, result: Compilation) -> None:
        """Store a result. A folder that cannot be written is no error: the kernel is then compiled again next time."""
        if result.error:
            return
        text = json.dumps(asdict(result))
        with suppress(OSError):
            replace_file(self.folder / name, f"{_checksum(text)}\n{text}")
