"""How many bytes autograd saves for the backward pass of a GPT: by formula, since ranks need not run to be asked.

Counted is what a forward pass of one micro-batch with a weighted loss saves, each storage once, parameters left out, on
the first rank (which has the most). Not counted is what lives for a moment: workspaces of operators, gathered inputs,
chunks of logits, gradients on their way, slots of communication.

For each token, in numbers, of a block on one rank; C: features, H: heads. Its input, mean and deviation of the first
norm, the norm's output; q, k, v; attention's output and log-sum-exp; the same again of the second norm; what is before
the GELU, and behind it (`tpfuse.parallel.recompute` says what is left out of it):

    none       C + 2 + C + 3 C + C + H + C + 2 + C + 4 C + 4 C = 16 C + 4 + H
    selective  C + 2 + C + 3 C         + C + 2 + C + 4 C       = 11 C + 4
    full       C

Tensor-parallel ranks keep these of m = M / tp tokens where nothing is gathered, which is in the norms and in the inputs
of first layers, and of all M tokens their share of features and heads elsewhere. Context-parallel ranks have fewer
tokens. Outside the blocks: ids and positions, the last norm, and the gradients that the loss makes in its forward pass.

Under autocast the inputs of norms have the parameters' dtype and all else has the dtype of products. Each linear layer
also keeps a copy of its weight in that dtype: 12 C² numbers of a block.
"""

from dataclasses import dataclass

import torch

from tpfuse.models.gpt_config import GPTConfig
from tpfuse.parallel.recompute import Recompute

_INT64 = 8
_LOSS_CHUNK = 4096  # tokens, of `tpfuse.ops.linear_cross_entropy` on GPUs
_LOSS_ROWS = 16  # to which it pads the vocabulary there


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one go.

    sequences: of the micro-batch; tokens: of each that this rank has, padding among them; length: of a whole sequence;
    tp: ranks that share the features; exchanged: whether context ranks exchange heads (Ulysses); triton: whether
    Triton's kernels compute, or torch's; autocast: the dtype of products where it is not `dtype`, the parameters'.
    """

    config: GPTConfig
    sequences: int
    tokens: int
    dtype: torch.dtype
    tp: int = 1
    exchanged: bool = False
    triton: bool = True
    autocast: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Bytes of a number that a product takes or returns."""
        return (self.autocast or self.dtype).itemsize

    @property
    def all_rows(self) -> int:
        """M: tokens of the tensor-parallel ranks, padded."""
        return -(-self.sequences * self.tokens // self.tp) * self.tp

    @property
    def local_rows(self) -> int:
        """m: those of this rank between the blocks."""
        return self.all_rows // self.tp

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed in float32 at least."""
        return max(self.dtype.itemsize, 4)

    @property
    def norm(self) -> int:
        """Bytes of mean and deviation for each token: torch keeps them in x's dtype, our kernels in float32."""
        return 2 * (self.wide if self.triton else self.dtype.itemsize)

    @property
    def dropped(self) -> int:
        """Numbers of a mask between the blocks: torch's kernels keep it, ours make it anew."""
        return self.local_rows * self.config.n_embd if self.config.dropout and not self.triton else 0

    @property
    def weights(self) -> int:
        """Bytes of the copies of a block's weights."""
        return 12 * self.config.n_embd**2 // self.tp * self.size if self.autocast else 0


def saved_bytes(batch: MicroBatch, recompute: Recompute = "none") -> int:
    """Bytes that are saved on the first rank.

    Exact but where torch's kernels drop probabilities of attention: that, a matter of CPUs, is exact for float32 on one
    rank, and about right for other dtypes.
    """
    config, size = batch.config, batch.size
    row = config.n_embd * size
    vocabulary = -(-config.vocab_size // batch.tp)
    masked = batch.tp > 1  # whose ids are this rank's
    ids = batch.all_rows * (_INT64 + masked) + batch.local_rows * _INT64
    norm = batch.local_rows * (config.n_embd * batch.dtype.itemsize + batch.norm)
    padded = batch.triton and (size >= 4 or batch.all_rows <= _LOSS_CHUNK)
    rows = -(-vocabulary // _LOSS_ROWS) * _LOSS_ROWS if padded else vocabulary
    loss = batch.all_rows * (batch.wide + row) + rows * row
    drop = batch.dropped * batch.dtype.itemsize
    if config.dropout and batch.triton:  # row numbers, and keys, of all sites
        drop = batch.local_rows * _INT64 + 4 * config.n_layer * _INT64
        if recompute == "none":
            drop += batch.sequences * (config.n_head // batch.tp) * _INT64  # the numbers of heads
    return ids + drop + config.n_layer * block_bytes(batch, recompute) + norm + loss


def block_bytes(batch: MicroBatch, recompute: Recompute) -> int:
    """Of these, those of each block."""
    size, tp = batch.size, batch.tp
    row, stream = batch.config.n_embd * size, batch.config.n_embd * batch.dtype.itemsize
    if recompute == "full":
        return batch.local_rows * stream
    between = batch.local_rows * (2 * stream + 2 * row + 2 * batch.norm) + 2 * batch.dropped * size + batch.weights
    if recompute == "selective":
        return between + batch.all_rows * (3 + 4) * row // tp
    return between + batch.all_rows * 8 * row // tp + _attention_bytes(batch)


def _attention_bytes(batch: MicroBatch) -> int:
    """q, k, v, the output that the projection keeps, and what attention itself does."""
    config, size, tp = batch.config, batch.size, batch.tp
    tokens = batch.sequences * batch.tokens  # without padding to a multiple of tp
    row, heads = config.n_embd * size // tp, config.n_head // tp
    saved = batch.all_rows * (3 + 1) * row
    if batch.exchanged:  # q, k, v are kept as exchanged, and the output before it is exchanged back
        saved = (tokens * (3 + 1) + batch.all_rows) * row
    elif tokens < batch.all_rows:
        saved += tokens * row  # the output before it is padded
    whole_sequences = batch.tokens == config.n_positions  # context ranks compute probabilities again
    if config.dropout and not batch.triton and whole_sequences:
        scores = batch.sequences * heads * batch.tokens**2
        copies = 3 if size >= 4 else 2 + 4 // size
        return saved + scores * copies * size + batch.tokens * (batch.tokens + 1)
    return saved + tokens * heads * batch.wide
