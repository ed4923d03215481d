"""The names that options accept. This module imports nothing, so that the command line reads it before torch."""

from typing import Literal

Balance = Literal["zigzag", "contiguous", "striped"]
"""The rule that says which tokens of a sequence a context-parallel rank has (`tpfuse.ops.ring_attention.layout`)."""
ContextSchedule = Literal["auto", "ring", "all_gather", "ulysses", "ulysses_ring"]
"""The schedule by which context-parallel ranks attend to each other's tokens (`tpfuse.ops.ring_attention`)."""
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
"""The order in which pipeline stages compute their micro-batches (`tpfuse.parallel.pipeline.order`)."""
Implementation = Literal["auto", "fused", "direct", "collective"]
"""The way in which tensor-parallel products and collectives communicate (`tpfuse.switches`)."""
Kernels = Literal["auto", "triton", "torch"]
"""The kernels that compute (`tpfuse.switches`)."""
GradientDtype = Literal["float32", "parameter"]
"""The dtype in which gradients are accumulated and kept (`tpfuse.zero.gradient_buckets`)."""
Accumulate = Literal["sharded", "whole"]
"""The part of the gradients of earlier micro-batches that a rank keeps at ZeRO's stages 2 and 3."""
MomentDtype = Literal["float32", "bfloat16"]
"""The dtype in which AdamW keeps its moments (`tpfuse.zero.sharding.adamw`)."""
Recompute = Literal["none", "selective", "full"]
"""The activations that the backward pass computes again (`tpfuse.parallel.recompute`)."""
