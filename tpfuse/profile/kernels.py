"""The kernels that wait for other ranks, and the programs that run those alone.

Nothing here imports torch or Triton. A test compares the table with what the kernels call.
"""

import functools
import importlib.util
import re
from pathlib import Path

# For each kernel that waits, a program of `python -m tpfuse.tools.one_rank` that launches it; None if there is none.
PROGRAMS = {
    "all_gather_forward_kernel": "collectives",
    "all_gather_gemm_forward_kernel": "all_gather_gemm",
    "all_gather_gemm_ping_pong_kernel": None,
    "all_reduce_one_shot_kernel": "collectives",
    "all_reduce_two_shot_kernel": "collectives",
    "all_to_all_forward_kernel": "collectives",
    "await_part_kernel": "gemm_reduce_scatter, copy engines",
    "close_copies_kernel": None,
    "gemm_reduce_scatter_forward_kernel": "gemm_reduce_scatter",
    "gemm_reduce_scatter_ping_pong_kernel": None,
    "open_copies_kernel": "all_gather_gemm, copy engines",
    "reduce_scatter_forward_kernel": "collectives",
    "ring_attention_dq_kernel": "ring_attention",
    "ring_attention_forward_kernel": "ring_attention",
    "send_message_kernel": "messages",
    "shard_sum_kernel": "sharded_adamw",
    "sharded_adamw_kernel": "sharded_adamw",
    "signal_wait_kernel": None,
    "sum_parts_kernel": "gemm_reduce_scatter, copy engines",
}


@functools.cache
def kernels() -> dict[str, bool]:
    """Return whether each kernel of tpfuse waits for other ranks, by its name, which Nsight shows."""
    spec = importlib.util.find_spec("tpfuse.kernels")
    assert spec is not None and spec.submodule_search_locations
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    names = [name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text("utf-8"), re.M)]
    return {name: name in PROGRAMS for name in names}
