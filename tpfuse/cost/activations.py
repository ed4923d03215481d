"""The bytes of activations that a rank keeps of one micro-batch, and the largest tensors that come and go.

For tpfuse's GPT, `tpfuse.models.saved_activations` counts exactly what autograd saves. For other models and programs a
block on one rank keeps these numbers for each token, with C features, Q and K features of all heads of q and of k, and
I features inside the MLP:

    inputs and outputs of both norms     4 C, and their statistics in float32
    q, k, v and attention's output       2 Q + 2 K
    fused attention                      the log-sum-exp of each head in float32
    attention that writes its scores     T scores of each head; with dropout a mask and the scores that it leaves too
    MLP without and with a gate          2 I and 3 I; 4 I if activation and gate are two operators

Tensor-parallel ranks have equal shares of heads and of the MLP, and of the tokens of the other tensors if they share
the sequence. The sources are Korthikanti et al., arXiv:2205.05198, table 2, which does not count statistics, and what
autograd saves of models of transformers after `tpfuse.parallelize`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from tpfuse.choices import Recompute
from tpfuse.cost.layout import Share
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.models.gpt_config import GPTConfig
from tpfuse.models.saved_activations import MicroBatch, saved_bytes
from tpfuse.models.saved_activations import block_bytes as gpt_block_bytes
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import schedule_for
from tpfuse.parallel.pipeline.cut import Stage

DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by the bytes of an element
LOSS_CHUNK = 4096  # tokens whose logits `tpfuse.ops.linear_cross_entropy` holds at once


@dataclass(frozen=True)
class Saved:
    """The bytes of one micro-batch.

    block: kept by each block. stage, first, last: kept by each stage besides, by the first one, and by the last one.
    block_gradients, last_gradients: the gradients that a split backward pass keeps between its parts of each block, and
    those of the last stage besides. inside: the part of a stage's gradients that is its own output, and not counted.
    block_peak: the most that comes and goes while a block computes its gradients. loss_peak: the most that comes and
    goes while the loss is computed. message: what pipeline ranks send each other.
    """

    block: int
    stage: int
    first: int
    last: int
    block_peak: int
    loss_peak: int
    message: int
    block_gradients: int
    last_gradients: int
    inside: int


def is_gpt(sizes: ModelSizes) -> bool:
    """Return whether the sizes are those of a GPT of `tpfuse.models.gpt`."""
    plain = sizes.heads == sizes.kv_heads and sizes.heads * sizes.head_size == sizes.width and not sizes.gated
    return plain and sizes.inner == 4 * sizes.width and sizes.tied and sizes.positions >= sizes.tokens


@lru_cache(4096)
def saved(sizes: ModelSizes, share: Share, program: Program) -> Saved:
    """Return what a rank keeps of a micro-batch."""
    tp, cp, micro_batch, recompute = share
    tokens = sizes.tokens if cp == 1 else SequenceLayout(sizes.tokens, cp).local_length
    rows = -(-micro_batch * tokens // tp) * tp
    size, vocabulary = program.parameter_bytes, -(-sizes.vocabulary // tp)
    message = _between(rows, tp, program) * sizes.width * size
    whole = block_bytes(sizes, tp, tokens, micro_batch, "none", program)
    if program.chunked_loss and is_gpt(sizes):
        batch = _gpt_batch(sizes, share, tokens, size)
        block, stage = (
            gpt_block_bytes(batch, recompute),
            saved_bytes(batch, recompute, Stage(1, range(0), False, False)),
        )
        first = saved_bytes(batch, recompute, Stage(0, range(0), True, False)) - stage
        last = saved_bytes(batch, recompute, Stage(1, range(0), False, True)) - stage
        loss = min(rows, LOSS_CHUNK) * vocabulary * size
        loss += vocabulary * sizes.width * 4 if rows > LOSS_CHUNK else 0  # the sum of the chunks' gradients
    else:
        block, stage, first = block_bytes(sizes, tp, tokens, micro_batch, recompute, program), 0, rows * 8  # ids
        norm = _between(rows, tp, program) * (2 * sizes.width * size + _statistics(sizes, program))
        first += _between(rows, tp, program) * sizes.width if sizes.dropout and program.keeps_masks else 0
        last, loss = norm + rows * (vocabulary * 4 + 16), rows * vocabulary * size  # targets and sums of 8 bytes
    peak = _block_peak(sizes, tp, rows, micro_batch * tokens, program) + max(0, whole - block)
    between = _between(rows, tp, program) * sizes.width * size
    features = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size + sizes.inner * (1 + sizes.gated)
    gradients = 4 * between + rows * features * size // tp
    return Saved(block, stage, first, last, peak, loss, message, gradients, between, 0 if sizes.dropout else between)


def block_bytes(
    sizes: ModelSizes, tp: int, tokens: int, micro_batch: int, recompute: Recompute, program: Program
) -> int:
    """Return the bytes that a block keeps of a micro-batch. tokens: of each sequence on this rank.

    With "selective", fused attention and the activation are computed again from their inputs, as tpfuse does it;
    without fused attention only the scores are, as Megatron does it.
    """
    size, rows = program.parameter_bytes, -(-micro_batch * tokens // tp) * tp
    between, width = _between(rows, tp, program), sizes.width
    if recompute == "full":
        return between * width * size
    query, key = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    masks = 2 * width if sizes.dropout and program.keeps_masks else 0
    total = between * (4 * width * size + 2 * _statistics(sizes, program) + masks)
    kept = 2 * query + 2 * key + sizes.inner * (2 + sizes.gated * (1 if program.fused_gate else 2))
    if recompute == "selective" and program.fused_attention:
        kept = query + 2 * key + sizes.inner * (1 + sizes.gated)
    total += rows * kept * size // tp
    if recompute == "none":
        total += _attention(sizes, tp, tokens, micro_batch, program)
    return total


def _attention(sizes: ModelSizes, tp: int, tokens: int, micro_batch: int, program: Program) -> int:
    """Return what attention keeps besides its inputs and its output."""
    heads = sizes.heads // tp
    if program.fused_attention:
        return micro_batch * tokens * heads * 4
    element = program.parameter_bytes + ((program.parameter_bytes + 1) if sizes.dropout else 0)
    return micro_batch * heads * tokens * sizes.tokens * element


def _block_peak(sizes: ModelSizes, tp: int, rows: int, tokens: int, program: Program) -> int:
    """Return the gradients inside an MLP, and the gathered tensors and gradients of the features between blocks.

    Without fused attention the gradients of the scores are larger than those for long sequences.
    """
    shared = tp > 1 and program.sequence_parallel
    inner = rows * sizes.inner // tp * (2 + sizes.gated)
    scores = 0 if program.fused_attention else 2 * tokens * sizes.tokens * sizes.heads // tp
    features = (2 * rows if shared else 0) + 2 * _between(rows, tp, program)
    weight = 0 if program.placeholder_gradients else sizes.inner * sizes.width // tp * (1 + sizes.gated)
    return (max(inner, scores) + features * sizes.width + weight) * program.parameter_bytes


def _between(rows: int, tp: int, program: Program) -> int:
    """Return the tokens whose features this rank has between the tensor-parallel products."""
    return rows // tp if program.sequence_parallel else rows


def _statistics(sizes: ModelSizes, program: Program) -> int:
    """Return the bytes of a norm's statistics of a token: a mean only if the norm has a bias."""
    return 4 * (1 + sizes.norm_bias) if program.keeps_statistics else 0


def _gpt_batch(sizes: ModelSizes, share: Share, tokens: int, size: int) -> MicroBatch:
    """Return the micro-batch as the GPT counts it. tokens: of a sequence on this rank. size: bytes of an element."""
    tp, cp, micro_batch, _ = share
    config = GPTConfig(
        sizes.vocabulary, sizes.tokens, sizes.width, sizes.layers, sizes.heads, sizes.biases,
        dropout=0.1 if sizes.dropout else 0.0,
    )  # fmt: skip
    exchanged = False
    if cp > 1:
        heads = sizes.heads // tp
        shape = (micro_batch, heads, tokens, sizes.head_size)
        exchanged = schedule_for("collective", shape, heads, DTYPES[size], cp)[0] == "ulysses"
    return MicroBatch(config, micro_batch, tokens, DTYPES[size], tp, exchanged)
