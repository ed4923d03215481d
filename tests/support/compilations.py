"""The report that `python -m tpfuse.tools.compilation --json` prints."""

import json

from tpfuse.kernels.configurations import Configuration
from tpfuse.tools.compilation import CompilationReport, _read


def read_report(text: str) -> CompilationReport:
    """Return the report that was printed. Raise JSONDecodeError if it is none."""
    document = json.loads(text)
    return CompilationReport(
        document["triton"],
        [_read(fields) for fields in document["compilations"]],
        [Configuration(**row) for row in document["rows"]],
    )
