"""The bytes of activations that a rank keeps of one micro-batch, and the largest tensors that come and go.

A block on one rank keeps these numbers for each token, with C features, H heads, Q and K features in all heads of q and
k, and I features inside the MLP:

    inputs and outputs of both norms     4 C, and their statistics
    q, k, v and attention's output       2 Q + 2 K
    fused attention                      the log-sum-exp of each head: H
    attention that writes its scores     T scores of each head; with dropout a mask and the scores that it leaves too
    MLP without and with a gate          2 I and 3 I; 4 I if activation and gate are two operators

For the GPT this is 16 C + 4 + H; with "selective" recomputation, of attention and the activation, 11 C + 4; with "full"
recomputation C (`tpfuse.parallel.recompute`), and nothing if that is offloaded (`tpfuse.parallel.offloaded_inputs`).
Under autocast, the inputs of norms have the parameters' dtype and all other tensors have the dtype of products, and
each linear layer keeps a copy of its weight in that dtype.

Tensor-parallel ranks keep the tensors between their products for m = M / tp tokens if they share the sequence, and
their share of features and heads of the other tensors for all M tokens. Context-parallel ranks have fewer tokens.
Outside the blocks, a model keeps ids, the tensors of the last norm, and what the loss needs: the GPT's loss computes
its gradients in the forward pass, those of transformers keep the logits in float32.

The count is that of the first rank, which keeps the most. For the GPT it is exact, unless torch's kernels apply dropout
to the probabilities of attention, as they do on CPUs: it is then exact for float32 on one rank. Blocks of transformers
keep more than these numbers, such as norms in float32: what they keep is counted in a forward pass without memory
(`tpfuse.drop_in.kept_activations`), and shared like the rest. Sources: Korthikanti et al., arXiv:2205.05198, table 2,
which does not count statistics; `tests/plan/test_memory.py` compares with what autograd saves.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from tpfuse.ops.linear_cross_entropy import chunk_of
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.schedule import schedule_for
from tpfuse.plan.sizes import ModelSizes, RankShare, TrainingProgram

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by the bytes of an element
_INT64 = 8


@dataclass(frozen=True)
class Activations:
    """The bytes of one micro-batch."""

    # Kept by each block; by each stage in addition; and by the model's first and last stage in addition.
    block: int
    stage: int
    first: int
    last: int
    # The most that comes and goes while a block computes its gradients, and while the loss is computed.
    block_peak: int
    loss_peak: int
    # What pipeline ranks send each other.
    message: int
    # The gradients that a split backward pass keeps between its parts of each block, and of the last norm.
    block_gradients: int
    last_gradients: int
    # The part of a stage's gradients that is the gradient of its own output, which belongs to the next stage.
    output_gradient: int


@lru_cache(4096)
def activations(sizes: ModelSizes, share: RankShare, program: TrainingProgram) -> Activations:
    """Return what a rank keeps of a micro-batch."""
    rank, width, vocabulary = _Rank(sizes, share, program), sizes.width, -(-sizes.vocabulary // share.tp)
    between, rows, stream, size = rank.between, rank.rows, rank.stream, rank.size
    stage, first = 0, rows * _INT64  # ids
    last = between * (width * stream + rank.statistics)  # the norm's input
    if sizes.is_gpt:
        masked = share.tp > 1  # a mask of one byte per token says which ids are in this rank's shard of the vocabulary
        first += rows * masked + between * _INT64  # positions
        last += (rows + vocabulary) * width * size  # the gradients of the loss
        chunk = chunk_of(rows)
        loss = min(rows, chunk) * vocabulary * size
        loss += vocabulary * width * 4 if rows > chunk else 0  # the sum of the chunks' gradients
        if sizes.dropout and program.triton:  # the numbers of rows and heads, and the keys of all sites
            heads = share.micro_batch * (sizes.heads // share.tp) if share.recompute == "none" else 0
            stage = (between + 4 * sizes.layers + heads) * _INT64
    else:
        last += between * width * size + rows * (vocabulary * 4 + 2 * _INT64)  # logits, targets and sums
        loss = rows * vocabulary * size
    first += between * width * rank.mask(stream)  # that of the embeddings
    block, held = rank.block_bytes(share.recompute), 0
    if program.offloads_inputs and share.recompute == "full":  # the device has one input beside the block that computes
        block, held = 0, block
    features = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size + sizes.inner * (1 + sizes.gated)
    return Activations(
        block,
        stage,
        first,
        last,
        rank.block_peak() + max(0, rank.block_bytes("none") - block) + held,
        loss + held,
        rank.message_rows * width * stream,
        2 * between * width * (stream + size) + rows * features * size // share.tp,
        between * width * size,
        0 if sizes.dropout else between * width * stream,
    )


class _Rank:
    """The numbers from which the bytes of a rank follow.

    tokens: of a sequence on this rank. rows: M, the tokens of its tensor-parallel group, padded. between: m, those of
    this rank between the products. size, stream: the bytes of an element of a product, and between the blocks.
    statistics: the bytes of a norm's statistics of a token.
    """

    def __init__(self, sizes: ModelSizes, share: RankShare, program: TrainingProgram) -> None:
        self.sizes, self.share, self.program = sizes, share, program
        tp, cp, sequences, _ = share
        layout = SequenceLayout(sizes.tokens, cp, program.balance, program.ulysses) if cp > 1 else None
        self.tokens = sizes.tokens if layout is None else layout.local_length
        # The GPT pads the tokens of all sequences together, models of transformers those of each sequence.
        self.message_rows = -(-sequences * self.tokens // tp) if sizes.is_gpt else sequences * -(-self.tokens // tp)
        self.rows = self.message_rows * tp
        if not program.sequence_parallel:
            self.message_rows = self.rows
        self.between = self.message_rows
        self.stream = program.parameter_bytes
        self.size = program.autocast_bytes or self.stream
        kept = 2 if sizes.is_gpt else 1 + sizes.norm_bias  # RMS norms have no mean
        self.statistics = kept * (program.state_bytes if program.triton else self.stream)

    def mask(self, size: int) -> int:
        """Return the bytes that dropout's mask takes for an element; torch's kernels keep `size`."""
        return 0 if self.program.triton else size * self.sizes.dropout

    def block_bytes(self, recompute: str) -> int:
        """Return the bytes that a block keeps.

        With "selective", fused attention and the activation are computed again from their inputs, as tpfuse does it;
        without fused attention only the scores are, as Megatron does it.
        """
        sizes, program, tp = self.sizes, self.program, self.share.tp
        if recompute == "full":
            return self.between * sizes.width * self.stream
        query, key = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        if sizes.kept:
            # Tensor-parallel ranks copy the output of attention, to order the tokens of all sequences by position.
            copied = query * self.size * (tp > 1 and self.share.micro_batch > 1)
            return int(self.rows * (sizes.kept[tp > 1] + copied)) // tp
        total = 2 * self.between * (sizes.width * (self.stream + self.size + self.mask(self.size)) + self.statistics)
        if program.autocast_bytes:
            total += sizes.block_weights // tp * self.size
        if recompute == "selective" and program.fused_attention:
            return total + self.rows * (query + 2 * key + sizes.inner * (1 + sizes.gated)) * self.size // tp
        inner = sizes.inner * (2 + sizes.gated * (1 if program.fused_gate else 2))
        total += self.rows * inner * self.size // tp
        if recompute == "selective":
            return total + self.rows * (2 * query + 2 * key) * self.size // tp
        return total + self._attention_bytes(query, key)

    def _attention_bytes(self, query: int, key: int) -> int:
        """Return the bytes of q, k, v, of the output that the projection keeps, and of attention's own tensors."""
        sizes, program, (tp, cp, sequences, _) = self.sizes, self.program, self.share
        tokens, heads, size = sequences * self.tokens, sizes.heads // tp, self.size
        total = self.rows * (2 * query + 2 * key) * size // tp
        if cp > 1 and self._exchanges_heads():  # q, k, v are kept exchanged, and the output before it is exchanged back
            total = (tokens * (2 * query + 2 * key) + self.rows * query) * size // tp
        elif sizes.is_gpt and tokens < self.rows:
            total += tokens * query * size // tp  # the output before it is padded
        if not program.fused_attention:
            element = size + ((size + 1) if sizes.dropout else 0)
            return total + heads * tokens * sizes.tokens * element
        if sizes.dropout and not program.triton and cp == 1:  # context-parallel ranks compute probabilities again
            wide = max(size, 4)  # half types are converted
            total += self.rows * (query + 2 * key) * (wide - size) // tp
            return total + heads * tokens * sizes.tokens * 3 * wide + sizes.tokens * (sizes.tokens + 1)
        return total + tokens * heads * program.state_bytes

    def _exchanges_heads(self) -> bool:
        """Return whether context-parallel ranks exchange heads (Ulysses)."""
        sizes, program, (tp, cp, sequences, _) = self.sizes, self.program, self.share
        schedule = program.context_schedule
        if schedule == "auto":
            shape = (sequences, sizes.heads // tp, self.tokens, sizes.head_size)
            kv_heads = -(-sizes.kv_heads // tp)
            schedule, _ = schedule_for(program.implementation, shape, kv_heads, DTYPES[self.size], cp)
        return schedule in ("ulysses", "ulysses_ring")

    def block_peak(self) -> int:
        """Return the gradients inside an MLP, and the gathered tensors and gradients of the features between blocks.

        Without fused attention the gradients of the scores are larger than those for long sequences.
        """
        sizes, program, tp = self.sizes, self.program, self.share.tp
        inner = self.rows * sizes.inner // tp * (2 + sizes.gated)
        scores = self.share.micro_batch * self.tokens * sizes.tokens * sizes.heads // tp
        features = (2 * self.rows if tp > 1 and program.sequence_parallel else 0) + 2 * self.between
        weight = 0 if program.placeholder_gradients else sizes.inner * sizes.width // tp * (1 + sizes.gated)
        most = max(inner, 0 if program.fused_attention else 2 * scores)
        return (most + features * sizes.width + weight) * program.parameter_bytes
