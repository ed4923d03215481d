"""`tpfuse evaluate` measures the loss of a run, or of a Hugging Face folder, on all tokens of a text.

The first rank reads the text and sends each window to all ranks, which need not see its files. Data-parallel ranks
share the windows: each of them adds up the losses of its own, and the sum over all ranks is divided by the number of
tokens, so that every token counts once in any layout.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tpfuse.comm.collectives.collective import broadcast_
from tpfuse.commands.shared_model import ModelRanks, SavedModel, on_ranks
from tpfuse.errors import UserError
from tpfuse.ops.cross_entropy import IGNORE
from tpfuse.train.batches import MicroBatch, Mixture
from tpfuse.train.config import parse_train
from tpfuse.train.data import read_data, read_sources
from tpfuse.train.options import EvaluateCommand, TrainCommand
from tpfuse.train.tokenizer import ByteTokenizer, TokenSequence, document_start

_TOKENS = 8192  # tokens of a forward pass, if the context is not longer


@torch.no_grad()
def loss_sum(ranks: ModelRanks, tokens: TokenSequence | None, count: int, length: int) -> float:
    """Return this rank's part of the summed losses, in nats. Tokens 1 to count - 1 are each predicted once.

    tokens: `count` of them, which the first rank alone has. The windows of `length` tokens are contiguous and do not
    overlap. The last one may be shorter.
    """
    whole, rest = divmod(count - 1, length)
    micro_batches = ranks.options.train.batch // ranks.replicas
    total, start = 0.0, 0
    while start < whole:
        parts = ranks.replicas * micro_batches
        rows = min(max(1, _TOKENS // length), -(-(whole - start) // parts))
        stop = min(whole, start + rows * parts)
        both = _sent(ranks, tokens, start * length, stop * length + 1)
        missing = (rows * parts - (stop - start)) * length  # tokens without a loss, so that all parts are equal
        ids = F.pad(both[:-1], (0, missing)).view(parts, rows, length)
        targets = F.pad(both[1:], (0, missing), value=IGNORE).view(parts, rows, length)
        own = range(ranks.replica * micro_batches, (ranks.replica + 1) * micro_batches)
        for loss in ranks.losses([MicroBatch(ids[part], targets[part]) for part in own]):
            total += loss.item()
        start = stop
    if rest:
        both = _sent(ranks, tokens, whole * length, count)
        missing = max(0, ranks.model.context.size - rest)  # each context-parallel rank has a token
        ids, targets = F.pad(both[:-1], (0, missing)), F.pad(both[1:], (0, missing), value=IGNORE)
        if ranks.replica == 0:
            for loss in ranks.losses([MicroBatch(ids[None], targets[None])]):
                total += loss.item()
    tensor_rank = 0 if ranks.model.device_mesh is None else ranks.model.device_mesh.get_local_rank()
    return total if tensor_rank == 0 else 0.0  # tensor-parallel ranks have the same loss


def _sent(ranks: ModelRanks, tokens: TokenSequence | None, start: int, stop: int) -> Tensor:
    """Return tokens [start, stop) on all ranks, int64. tokens: on the first rank alone."""
    if tokens is None:
        both = torch.empty(stop - start, dtype=torch.int64, device=ranks.device)
    else:
        both = torch.from_numpy(tokens[start:stop].astype(np.int64)).to(ranks.device)
    if ranks.group is not None:
        broadcast_([both], ranks.group)
    return both


def evaluate(run: Path, options: EvaluateCommand) -> str | int:
    """Return the result in one line, or an exit status if another process prints it.

    run: the folder of a run, or of a Hugging Face model. The loss on several sources is the mean of their losses, with
    their weights. Raise UserError, and as `tpfuse.commands.shared_model.on_ranks` does.
    """
    return on_ranks(_evaluated, options.parallel, options.comm, run, options)


@dataclass(frozen=True)
class _Evaluation:
    """The first rank's data, without the tokens. counts, shares: of each source. length: of a window."""

    saved: SavedModel
    source: str
    counts: list[int]
    shares: tuple[int, ...]
    length: int
    masks: bool


def mean_loss(ranks: ModelRanks, run: Path, options: EvaluateCommand) -> tuple[float, _Evaluation]:
    """Return the mean loss in nats of each token, and what it was measured on."""
    own: list[Mixture] = []  # the tokens, on the first rank

    def find() -> _Evaluation:
        task, tokens = _evaluation(ranks, run, options)
        own.append(tokens)
        return task

    task = ranks.from_first(find)
    model = ranks.load(task.saved)
    if task.masks:
        model.document_start = document_start(task.saved.tokenizer)
    sources = own[0].sources if own else [None] * len(task.counts)
    sums = [loss_sum(ranks, part, count, task.length) for part, count in zip(sources, task.counts, strict=True)]
    losses = [sum(parts) / (n - 1) for n, *parts in zip(task.counts, *ranks.gathered(sums), strict=True)]
    loss = sum(share * part for share, part in zip(task.shares, losses, strict=True)) / sum(task.shares)
    return loss, task


def _evaluated(ranks: ModelRanks, run: Path, options: EvaluateCommand) -> str:
    """Return the result of `evaluate` on the first rank."""
    loss, task = mean_loss(ranks, run, options)
    bits = f", {loss / math.log(2):.4f} bits per byte" if isinstance(task.saved.tokenizer, ByteTokenizer) else ""
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return (
        f"{run}: loss {loss:.4f} nats per token, perplexity {perplexity:.4g}{bits}"
        f" ({sum(task.counts) - len(task.counts):,} tokens of {task.source}, in windows of {task.length:,})"
    )


def _evaluation(ranks: ModelRanks, run: Path, options: EvaluateCommand) -> tuple[_Evaluation, Mixture]:
    """Return what is to be evaluated. Raise UserError, and CheckpointError if all checkpoints are damaged."""
    data, length = options.data, options.length
    if data.path is None and not (run / "config.toml").is_file() and (run / "config.json").is_file():
        raise UserError(f"{run} is no run, which would name its validation text: give --data.path")
    saved = ranks.find(run)
    context, cp = saved.config.longest, ranks.options.parallel.cp
    if length is not None and not cp <= length <= context:
        least = f"{cp} (--parallel.cp)" if cp > 1 else "1"
        raise UserError(f"--length {length}: expected {least} to {context}, the model's context")
    run_options = parse_train(["--resume", "--out", str(run)]) if (run / "config.toml").is_file() else TrainCommand()
    if data.path is None:
        kept = read_data(run_options.data, run / "data", run)
        tokens = kept.open(run_options.data.val_fraction)[1]
        source = f"the end of {kept.train.source}" if kept.val is None else kept.val.source
    else:
        with tempfile.TemporaryDirectory() as folder:
            sources = read_sources(data.path, data.field, Path(folder), saved.tokenizer)
            tokens, source = sources.open(), sources.source  # an open file is readable after its name is gone
    counts = [len(part) for part in tokens.sources]
    if min(counts) < 2:
        raise UserError(f"{source}: found {min(counts)} tokens, expected at least 2")
    masks = run_options.data.documents == "mask"
    return _Evaluation(saved, source, counts, tokens.shares, length or saved.config.n_positions, masks), tokens
