"""The forward pass that runs, and the tokens of it that a rank of a context has."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.drop_in.converted import ConvertedColumnLinear
from tpfuse.parallel.context import ShardedBatch


@dataclass(frozen=True, eq=False)
class ShardedTokens:
    """The tokens of a forward pass, sharded over the ranks of a context. Layers get them as their attention mask."""

    sharded: ShardedBatch
    shape: tuple[int, ...]  # (batch, length) of the whole sequences
    unseeing: Tensor | None  # [1, local_length] bool: padding before a text, which sees no key; None if there is none
    last_position: Tensor  # [1, 1]: the largest position of all tokens
    dropout_keys: Tensor | None  # [layers] int64: for the dropout of attention, if there is one
    tensor_rank: int
    tensor_ranks: int
    window: int | None = None  # as for `ring_attention`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            f"context parallelism: the model reads {name} of its attention mask: expected attention that transformers'"
            " AttentionInterface computes"
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens [batch, length, ...] of which x [..., local_length, ...] are this rank's, as a result."""
        whole = self.sharded.gather(x.reshape(self.sharded.batch, self.sharded.local_length, x.shape[-1]))
        return self.sharded.context.leave(whole).reshape(*self.shape, x.shape[-1])

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x [batch, length, width], which every rank has computed of results."""
        x = self.sharded.context.enter(x)
        return self.sharded.shard(x.reshape(self.sharded.batch, self.sharded.length, x.shape[-1]))

    def dropout(self, layer: int, p: float, query: Tensor) -> dict[str, Any]:
        """Return the options of attention that drop probabilities; query: [batch, heads, tokens, size]."""
        assert self.dropout_keys is not None
        documents, heads = self.sharded.documents, query.shape[1]
        sequences = len(query) if documents is None else len(documents.cu_seqlens) - 1
        sequence_rows = torch.arange(sequences, device=query.device).unsqueeze(1) * (heads * self.tensor_ranks)
        head_rows = torch.arange(heads, device=query.device) + heads * self.tensor_rank
        return {"dropout_p": p, "key": self.dropout_keys[layer], "head_rows": sequence_rows + head_rows}


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward pass that runs."""

    head: ConvertedColumnLinear | None  # the projection to the vocabulary if it keeps its output sharded
    tokens: ShardedTokens | None = None  # None if every rank has all tokens
    targets: Tensor | None = None  # this rank's labels, shifted, if tokens are sharded
    items: Tensor | int | None = None  # the number of labels of all ranks


class _Running(threading.local):
    """The pass that runs in a thread, None outside of all; torch.compile traces no ContextVar."""

    def __init__(self) -> None:
        self.now: ForwardPass | None = None


current = _Running()


def sharded_tokens() -> ShardedTokens | None:
    """Return the tokens of the forward pass that runs; None if every rank has all of them."""
    return None if current.now is None else current.now.tokens
