"""The names among which options choose, in a module that needs nothing: the command line reads it before torch."""

from typing import Literal

Balance = Literal["zigzag", "contiguous", "striped"]
"""Which tokens of a sequence a context-parallel rank has (`tpfuse.ops.ring_attention.layout`)."""
Schedule = Literal["auto", "ring", "all_gather", "ulysses", "ulysses_ring"]
"""How context-parallel ranks attend to each other's tokens (`tpfuse.ops.ring_attention.ring_attention`)."""
Implementation = Literal["auto", "fused", "direct", "collective"]
"""How tensor-parallel products and collectives communicate (`tpfuse.backend`)."""
Kernels = Literal["auto", "triton", "torch"]
"""Which kernels compute (`tpfuse.backend`)."""
GradientDtype = Literal["float32", "parameter"]
"""In which dtype gradients are accumulated and kept (`tpfuse.zero.gradient_buckets`)."""
Offload = Literal["none", "optimizer", "nvme"]
"""Where the optimizer's state lives (`tpfuse.zero.offload`)."""
Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again (`tpfuse.parallel.recompute`)."""
