"""Computes by a formula how many bytes autograd saves for the backward pass of a GPT, without running any rank.

The formula counts the tensors that a forward pass of one micro-batch with a weighted loss saves on the first rank,
which saves the most. It counts each storage once, and no parameters. It does not count short-lived memory: workspaces
of operators, gathered inputs, chunks of logits, gradients that are being computed, and slots of communication.

A block on one rank saves these numbers for each token, with C features and H heads: its input, the mean and deviation
of the first norm, and the norm's output; q, k, v; attention's output and log-sum-exp; the same three of the second
norm; the input and the output of the GELU (`tpfuse.parallel.recompute` says which of them are computed again):

    none       C + 2 + C + 3 C + C + H + C + 2 + C + 4 C + 4 C = 16 C + 4 + H
    selective  C + 2 + C + 3 C         + C + 2 + C + 4 C       = 11 C + 4
    full       C

Tensor-parallel ranks save the tensors that are not gathered, those of the norms and the inputs of first layers, for
m = M / tp tokens, and their share of features and heads of the other tensors for all M tokens. Context-parallel ranks
have fewer tokens. Outside the blocks, autograd saves ids and positions, the tensors of the last norm, and the gradients
that the loss computes in its forward pass.

Under autocast, the inputs of norms have the parameters' dtype and all other tensors have the dtype of products. Each
linear layer also saves a copy of its weight in that dtype: 12 C² numbers for each block.
"""

from dataclasses import dataclass

import torch

from tpfuse.models.gpt_config import GPTConfig
from tpfuse.parallel.pipeline.cut import Stage, whole_model
from tpfuse.parallel.recompute import Recompute

_INT64 = 8
_LOSS_CHUNK = 4096  # tokens of a chunk of `tpfuse.ops.linear_cross_entropy` on GPUs
_LOSS_ROWS = 16  # on GPUs it pads the vocabulary to a multiple of this


@dataclass(frozen=True)
class MicroBatch:
    """The micro-batch that one rank computes at once.

    sequences: the number of sequences. tokens: the tokens of each sequence that this rank has, including padding.
    dtype: the dtype of the parameters. tp: the number of ranks that share the features. exchanged: whether
    context-parallel ranks exchange heads (Ulysses). triton: whether Triton's kernels compute, or torch's. autocast: the
    dtype of products if it is not `dtype`.
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
        """Returns the bytes of an element that a product takes or returns."""
        return (self.autocast or self.dtype).itemsize

    @property
    def all_rows(self) -> int:
        """Returns M, the number of tokens of the tensor-parallel ranks, padded."""
        return -(-self.sequences * self.tokens // self.tp) * self.tp

    @property
    def local_rows(self) -> int:
        """Returns m, the number of tokens of this rank between the blocks."""
        return self.all_rows // self.tp

    @property
    def wide(self) -> int:
        """Returns the bytes of an element that is computed at least in float32."""
        return max(self.dtype.itemsize, 4)

    @property
    def norm(self) -> int:
        """Returns the bytes of mean and deviation of a token: torch keeps them in x's dtype, our kernels in float32."""
        return 2 * (self.wide if self.triton else self.dtype.itemsize)

    @property
    def dropped(self) -> int:
        """Returns the elements of a dropout mask between the blocks: torch's kernels save it, ours compute it again."""
        return self.local_rows * self.config.n_embd if self.config.dropout and not self.triton else 0

    @property
    def weights(self) -> int:
        """Returns the bytes of the copies of a block's weights."""
        return 12 * self.config.n_embd**2 // self.tp * self.size if self.autocast else 0


def saved_bytes(batch: MicroBatch, recompute: Recompute = "none", stage: Stage | None = None) -> int:
    """Returns the bytes that are saved on the first rank. stage: a pipeline stage; None for the whole model.

    The number is exact, unless torch's kernels apply dropout to the probabilities of attention, as they do on CPUs: it
    is then exact for float32 on one rank, and approximate for other dtypes.
    """
    config, size = batch.config, batch.size
    stage = stage or whole_model(config.n_layer)
    row = config.n_embd * size
    vocabulary = -(-config.vocab_size // batch.tp)
    masked = batch.tp > 1  # a mask of one byte per token says which ids are in this rank's shard of the vocabulary
    ids = batch.all_rows * (_INT64 + masked) + batch.local_rows * _INT64
    norm = batch.local_rows * (config.n_embd * batch.dtype.itemsize + batch.norm)
    padded = batch.triton and (size >= 4 or batch.all_rows <= _LOSS_CHUNK)
    rows = -(-vocabulary // _LOSS_ROWS) * _LOSS_ROWS if padded else vocabulary
    loss = batch.all_rows * (batch.wide + row) + rows * row
    drop = batch.dropped * batch.dtype.itemsize if stage.first else 0  # the mask of the embeddings
    if config.dropout and batch.triton:  # the row numbers, and the keys of all sites
        drop = batch.local_rows * _INT64 + 4 * config.n_layer * _INT64
        if recompute == "none":
            drop += batch.sequences * (config.n_head // batch.tp) * _INT64  # the numbers of heads
    blocks = drop + len(stage.layers) * block_bytes(batch, recompute)
    return blocks + (ids if stage.first else 0) + (norm + loss if stage.last else 0)


def gradient_bytes(batch: MicroBatch, stage: Stage) -> int:
    """Returns the bytes of gradients that a split backward pass keeps between its parts, on the first rank.

    The second part computes the gradients of weights. It needs the gradient of what each norm and each linear layer
    returns, for each token 11 C numbers in a block on one rank: C for each norm, 3 C and C in attention, 4 C and C in
    the MLP. That of the stage's own output is not counted, since it comes from the next stage; with dropout, that of
    the last linear layer is another tensor. `stage` is not the first one, whose backward pass has no first part.
    """
    config, row, stream = batch.config, batch.config.n_embd * batch.size, batch.config.n_embd * batch.dtype.itemsize
    block = batch.local_rows * (2 * row + 2 * stream) + batch.all_rows * (3 + 4) * row // batch.tp
    last_norm = batch.local_rows * row if stage.last else 0
    own_output = 0 if stage.last or config.dropout else batch.local_rows * stream
    return len(stage.layers) * block + last_norm - own_output


def block_bytes(batch: MicroBatch, recompute: Recompute) -> int:
    """Returns the bytes that each block saves on the first rank."""
    size, tp = batch.size, batch.tp
    row, stream = batch.config.n_embd * size, batch.config.n_embd * batch.dtype.itemsize
    if recompute == "full":
        return batch.local_rows * stream
    between = batch.local_rows * (2 * stream + 2 * row + 2 * batch.norm) + 2 * batch.dropped * size + batch.weights
    if recompute == "selective":
        return between + batch.all_rows * (3 + 4) * row // tp
    return between + batch.all_rows * 8 * row // tp + _attention_bytes(batch)


def _attention_bytes(batch: MicroBatch) -> int:
    """Returns the bytes of q, k, v, of the output that the projection saves, and of the tensors of attention itself."""
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
