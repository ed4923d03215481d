"""`tpfuse evaluate` measures the loss of a run, or of a Hugging Face folder, on all tokens of a text, on one rank."""

import math
import tempfile
from pathlib import Path

import numpy as np
import torch

from tpfuse.train.batches import MicroBatch
from tpfuse.train.config import parse_train
from tpfuse.train.data import kept_tokens, read_data, read_sources
from tpfuse.train.errors import UserError
from tpfuse.train.language_model import longest
from tpfuse.train.options import EvaluateDataOptions, TrainCommand
from tpfuse.train.rank_model import LanguageModel
from tpfuse.train.sample import load_model
from tpfuse.train.tokenizer import ByteTokenizer, TokenSequence, document_start

_TOKENS = 8192  # tokens of a forward pass, if the context is not longer


@torch.no_grad()
def mean_loss(model: LanguageModel, tokens: TokenSequence, device: torch.device, length: int) -> float:
    """Return the mean loss in nats over tokens 1 to n - 1 of n, each of which is predicted once.

    The windows of `length` tokens are contiguous and do not overlap. The last one may be shorter.
    """
    span = max(1, _TOKENS // length) * length
    total = 0.0
    for start in range(0, len(tokens) - 1, span):
        both = torch.from_numpy(tokens[start : start + span + 1].astype(np.int64)).to(device)
        whole = (len(both) - 1) // length * length
        if whole:
            total += model.loss(MicroBatch(both[:whole].view(-1, length), both[1 : whole + 1].view(-1, length))).item()
        if whole < len(both) - 1:
            total += model.loss(MicroBatch(both[None, whole:-1], both[None, whole + 1 :])).item()
    return total / (len(tokens) - 1)


def evaluate(run: Path, data: EvaluateDataOptions, length: int | None = None) -> str:
    """Return the result in one line. run: the folder of a run, or of a Hugging Face model.

    data: the text; without a path, the run's validation tokens. The loss on several sources is the mean of their
    losses, with their weights. length: the tokens of a window; None for those of a training sequence. Raise UserError.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if data.path is None and not (run / "config.toml").is_file() and (run / "config.json").is_file():
        raise UserError(f"{run} is no run, which would name its validation text: give --data.path")
    model, tokenizer = load_model(run, device)
    context = longest(model.config)
    if length is not None and not 1 <= length <= context:
        raise UserError(f"--length {length}: expected 1 to {context}, the model's context")
    length = length or model.config.n_positions
    options = parse_train(["--resume", "--out", str(run)]) if (run / "config.toml").is_file() else TrainCommand()
    if options.data.documents == "mask":
        model.document_start = document_start(tokenizer)
    if data.path is None:
        own = read_data(options.data, run / "data", kept_tokens(run, options.data))
        tokens = own.open(options.data.val_fraction)[1]
        source = f"the end of {own.train.source}" if own.val is None else own.val.source
    else:
        with tempfile.TemporaryDirectory() as folder:
            sources = read_sources(data.path, data.field, Path(folder), tokenizer)
            tokens, source = sources.open(), sources.source  # an open file is readable after its name is gone
    count = sum(len(part) - 1 for part in tokens.sources)
    if min(map(len, tokens.sources)) < 2:
        raise UserError(f"{source}: found {min(map(len, tokens.sources))} tokens, expected at least 2")
    losses = (mean_loss(model, part, device, length) for part in tokens.sources)
    loss = sum(share * part for share, part in zip(tokens.shares, losses, strict=True)) / sum(tokens.shares)
    bits = f", {loss / math.log(2):.4f} bits per byte" if isinstance(tokenizer, ByteTokenizer) else ""
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return (
        f"{run}: loss {loss:.4f} nats per token, perplexity {perplexity:.4g}{bits}"
        f" ({count:,} tokens of {source}, in windows of {length:,})"
    )
