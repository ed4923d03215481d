"""Batches that depend on (seed, step) alone, so that every layout draws the same windows and takes its own slice.

In the order `shuffled` the tokens are cut into windows that follow each other, and each epoch reads all of them in an
order of its own. A window is computed from its place in that order, so no list of them is kept. In the order `random`
each window begins anywhere, and a pass over as many tokens as there are leaves about 1/e of them unread.

A mixture has several sources. Each block of successive sequences takes a fixed number of sequences from each source, in
an order that is drawn for each block, so a source's share is exact after each block.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tpfuse.models.key_value_cache import KeyValueCache
from tpfuse.train.options import Order
from tpfuse.train.tokenizer import TokenSequence

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_CHUNK = 1 << 20  # tokens to count in one call: np.bincount converts each token to 8 bytes


class MicroBatch(NamedTuple):
    """Sequences for a loss, or without targets for logits. ids, targets: [sequences, tokens] int64, on all ranks."""

    ids: Tensor
    targets: Tensor | None = None
    # The factor of the loss.
    weight: float | None = 1.0
    # (seed, step) of the dropout in a training step, or its keys; None for none.
    at: tuple[int, int] | Tensor | None = None
    # The numbers of these sequences in the whole batch.
    sequences: Tensor | None = None
    # For logits: the GPT's keys and values; the number of ids in each row before padding (None: all).
    cache: KeyValueCache | None = None
    length: int | None = None


def permuted(key: bytes, places: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Return what a permutation of range(size) makes of `places`. key: chooses the permutation, 64 bytes.

    A Feistel network of 8 rounds (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
    functions", 1988) permutes all numbers of the smallest even number of bits that `size` needs. A result outside the
    range is permuted again until it is inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002), less than 4 times on average. Its round function is a multiplicative hash, which is no cipher.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values = places.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        left, right = values[walking] >> np.uint64(half), values[walking] & np.uint64((1 << half) - 1)
        for round_key in np.frombuffer(key, dtype="<u8"):
            hashed = (right ^ round_key) * _FACTOR
            hashed = (hashed ^ (hashed >> np.uint64(32))) * _FACTOR
            left, right = right, left ^ (hashed >> np.uint64(64 - half))
        values[walking] = (left << np.uint64(half)) | right
        walking = walking[values[walking] >= size]
    return values.astype(np.int64)


class Mixture(NamedTuple):
    """Sequences of tokens that are read side by side, each [n] uint16.

    shares: how many of `sum(shares)` successive windows come from each.
    """

    sources: tuple[TokenSequence, ...]
    shares: tuple[int, ...] = (1,)


class Windows:
    """Windows of `length` tokens, and for each of their tokens the one that follows.

    tokens: the tokens of a run, more than `length` from each source. stream: "train" or "val". ahead: in the order
    `shuffled`, the number of sequences read before batch 0, which may be negative: a run that resumes with another
    batch has read other sequences than `batch` for each step.
    """

    def __init__(
        self, tokens: TokenSequence | Mixture, length: int, seed: int, stream: str, batch: int, order: Order = "random"
    ) -> None:
        self.tokens = tokens if isinstance(tokens, Mixture) else Mixture((tokens,))
        self.length, self.seed, self.stream, self.batch = length, seed, stream, batch
        self.order, self.ahead = order, 0

    def _drawn(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the source of each sequence, and its place among the sequences of that source.

        numbers: sequence numbers, counted from the start of the run.
        """
        shares = self.tokens.shares
        if len(shares) == 1:
            return np.zeros_like(numbers), numbers
        blocks, places = np.divmod(numbers, sum(shares))
        sources, within = np.empty_like(numbers), np.empty_like(numbers)
        for block in np.unique(blocks).tolist():
            key = hashlib.blake2b(f"{self.seed} {self.stream} block {block}".encode()).digest()
            of_block = np.repeat(np.arange(len(shares)), shares)[permuted(key, np.arange(sum(shares)), sum(shares))]
            nth = np.empty_like(of_block)
            for source, share in enumerate(shares):
                nth[of_block == source] = block * share + np.arange(share)
            here = blocks == block
            sources[here], within[here] = of_block[places[here]], nth[places[here]]
        return sources, within

    def _shuffled(self, source: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where the windows of a source start that are at these places of its order."""
        count, spare = divmod(len(self.tokens.sources[source]) - 1, self.length)  # windows; tokens that fill no window
        epochs, places = np.divmod(places, count)
        starts = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            key = hashlib.blake2b(f"{self.seed} {_named(self.stream, source)} epoch {epoch}".encode()).digest()
            offset = int.from_bytes(key[:4], "little") % (spare + 1)  # so that windows are cut elsewhere in each epoch
            starts[epochs == epoch] = offset + self.length * permuted(key, places[epochs == epoch], count)
        return starts

    def sequences(self, number: int, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (ids, targets) of sequences [start, stop) of batch `number`, each [stop - start, length] int64."""
        sources, places = self._drawn(self.ahead + number * self.batch + np.arange(start, stop))
        starts = np.empty_like(places)
        for source in np.unique(sources).tolist():
            here = sources == source
            if self.order == "random":
                limit = len(self.tokens.sources[source]) - self.length
                name = f"{self.seed} {_named(self.stream, source)} {number}"
                key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
                drawn = np.random.Generator(np.random.Philox(key=key)).integers(0, limit, size=self.batch)
                starts[here] = drawn[start:stop][here]
            else:
                starts[here] = self._shuffled(source, places[here])
        windows = [
            self.tokens.sources[source][first : first + self.length + 1]
            for source, first in zip(sources.tolist(), starts.tolist(), strict=True)
        ]
        both = torch.from_numpy(np.stack(windows).astype(np.int64)).to(device)
        return both[:, :-1], both[:, 1:]


def _named(stream: str, source: int) -> str:
    return f"{stream} of source {source}" if source else stream


def unigram_loss(train: Mixture, val: Mixture, vocab_size: int) -> float:
    """Return the loss in nats per token on `val` of a model that knows only how often each token is in `train`.

    1 is added to each count, so that a token that is not in `train` has a finite loss.
    """
    counts = _mixed(train, vocab_size) + 1.0
    val_counts = _mixed(val, vocab_size)
    return float(-(val_counts * np.log(counts / counts.sum())).sum() / val_counts.sum())


def _mixed(tokens: Mixture, vocab_size: int) -> npt.NDArray[np.float64]:
    """Return how often each token is read while as many tokens are read as all sources have."""
    total = sum(map(len, tokens.sources))
    read = [total * share / sum(tokens.shares) for share in tokens.shares]
    counts = np.zeros(vocab_size, dtype=np.float64)
    for source, count in zip(tokens.sources, read, strict=True):
        parts = (source[start : start + _CHUNK] for start in range(0, len(source), _CHUNK))
        counts += sum(np.bincount(part, minlength=vocab_size) for part in parts) * (count / len(source))
    return counts
