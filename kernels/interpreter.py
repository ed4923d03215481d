"""Triton's interpreter: whether this process interprets kernels, and what that needs.

Triton decides it when a kernel is decorated: TRITON_INTERPRET=1 must be set before these modules are imported, and
applies to the whole process.
"""

from dataclasses import replace

import numpy as np
import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def interpreter_problem(triton_version: str = triton.__version__, numpy_version: str = np.__version__) -> str:
    """Return one line that says why this Triton cannot interpret kernels with this numpy; empty where it can."""
    ours, numpy = (tuple(int(x) for x in version.split(".")[:2]) for version in (triton_version, numpy_version))
    if ours >= (3, 7) or numpy < (2, 4):
        return ""
    return (
        f"Triton {triton_version} interprets kernels with numpy < 2.4 only, and this is numpy {numpy_version}: "
        "pip install 'numpy<2.4', or Triton 3.7"
    )


if INTERPRETED:
    if interpreter_problem():
        raise ImportError(interpreter_problem())  # once, in the module that every launcher imports
    from triton.runtime.interpreter import interpreter_builder

    # Its checks of integers for overflow take a third of its time, and it drops their results without `debug`.
    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
