"""Batches that depend on (seed, step) alone, so that every layout draws the same windows and takes its own slice."""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tpfuse.models.key_value_cache import KeyValueCache
from tpfuse.train.tokenizer import TokenSequence

_CHUNK = 1 << 20  # tokens that are counted at once: np.bincount converts each token to 8 bytes


class MicroBatch(NamedTuple):
    """What each stage of a model is given: the arguments of `LanguageModel.loss`, or without targets ids for logits.

    cache: of the GPT's keys and values, for logits. length: the number of ids in each row before padding, for logits;
    None for all.
    """

    ids: Tensor
    targets: Tensor | None = None
    weight: float | None = None
    at: tuple[int, int] | None = None
    sequences: Tensor | None = None
    cache: KeyValueCache | None = None
    length: int | None = None


def window_starts(
    seed: int, stream: str, number: int, count: int, limit: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns `count` window starts in [0, limit), which depend on (seed, stream, number) alone.

    stream: "train" or "val". number: the step, or the number of the validation batch.
    """
    digest = hashlib.blake2b(f"{seed} {stream} {number}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.integers(0, limit, size=count)


class Windows:
    """Windows of `length` tokens, and for each of their tokens the one that follows. tokens: [n] uint16, n > length."""

    def __init__(self, tokens: TokenSequence, length: int, seed: int, stream: str, batch: int) -> None:
        self.tokens, self.length, self.seed, self.stream, self.batch = tokens, length, seed, stream, batch

    def sequences(self, number: int, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns (ids, targets) of sequences [start, stop) of batch `number`, each [stop - start, length] int64."""
        starts = window_starts(self.seed, self.stream, number, self.batch, len(self.tokens) - self.length)
        windows = [self.tokens[first : first + self.length + 1] for first in starts[start:stop].tolist()]
        both = torch.from_numpy(np.stack(windows).astype(np.int64)).to(device)
        return both[:, :-1], both[:, 1:]


def unigram_loss(train: TokenSequence, val: TokenSequence, vocab_size: int) -> float:
    """Returns the loss in nats per token on `val` of a model that knows only how often each token is in `train`.

    1 is added to each count, so that a token that is not in `train` has a finite loss.
    """
    counts = _counted(train, vocab_size).astype(np.float64) + 1.0
    val_counts = _counted(val, vocab_size).astype(np.float64)
    return float(-(val_counts * np.log(counts / counts.sum())).sum() / val_counts.sum())


def _counted(tokens: TokenSequence, vocab_size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts
