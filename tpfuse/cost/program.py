"""The program that trains: which kernels it has, what it overlaps, and how many bytes its numbers take.

`TPFUSE` is ours. Measurements of other programs are compared with descriptions of theirs (`benchmarks.plan_accuracy`).
"""

from dataclasses import dataclass

# torchtitan's asynchronous tensor parallelism on H100 (its pages on performance and on asynchronous TP) made steps 9 to
# 10 % faster. A timeline without competition would hide nearly all communication, which is 37 to 53 %. The products of
# tpfuse are not measured on GPUs yet.
HIDDEN_SHARE = 0.35


@dataclass(frozen=True)
class Program:
    """A training program.

    fused_attention: whether one kernel computes attention; otherwise scores are written to memory. sequence_parallel:
    whether tensor-parallel ranks share the tokens between their products, and gather and scatter them; otherwise they
    all-reduce. overlap_tp: whether products overlap with this communication, chunk by chunk. hidden_share: the share
    that this really hides of what it could, since chunks compete for memory and multiprocessors. chunked_products:
    whether the product of each rank's tokens is an operator of its own. overlap_dp: whether gradients are reduced while
    the last micro-batch's backward pass computes, and parameters of ZeRO's stage 3 gathered ahead. block_operators:
    that the host issues for a block's forward pass, and again for its backward pass. collective_operators: how many
    operators take as long to issue as a collective. pass_operators: those of each pass of a stage besides.
    step_operators: those of each step besides. equal_stages: whether pipeline stages have equally many blocks;
    otherwise the cut counts the head as well. parameter_bytes, gradient_bytes: of an element. state_bytes: of an
    element's optimizer state, with its master.

    The other fields say what takes memory. chunked_loss: whether the logits of a GPT are never whole in memory.
    fused_gate: whether one operator computes the activation of a gated MLP and its product with the gate. keeps_masks:
    whether masks of dropout are kept. keeps_statistics: whether the statistics of norms are counted.
    placeholder_gradients: whether a tensor for each weight of a block stands for its gradient, which is in a buffer of
    another type. symmetric_slots: whether ranks have slots in symmetric memory for what they send. reserve: bytes that
    the context of CUDA, libraries and gaps between tensors take.
    """

    name: str
    fused_attention: bool = True
    sequence_parallel: bool = True
    overlap_tp: bool = True
    hidden_share: float = HIDDEN_SHARE
    chunked_products: bool = False
    overlap_dp: bool = True
    block_operators: int = 16
    collective_operators: float = 2
    pass_operators: float = 4
    step_operators: int = 20
    equal_stages: bool = False
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    state_bytes: int = 12
    chunked_loss: bool = True
    fused_gate: bool = False
    keeps_masks: bool = False
    keeps_statistics: bool = True
    placeholder_gradients: bool = False
    symmetric_slots: bool = True
    reserve: float = 1.5 * 2**30


TPFUSE = Program("tpfuse")
