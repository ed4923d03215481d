"""Checks of a run's data, once it is read."""

from tpfuse.errors import UserError
from tpfuse.train.data import RunData
from tpfuse.train.options import TrainCommand
from tpfuse.train.token_file import TokenFiles
from tpfuse.train.tokenizer import document_start

_SEARCHED = 1 << 26  # tokens in which a document must begin


_READ = 1 << 22  # tokens in one read


def check_lengths(options: TrainCommand, data: RunData) -> None:
    """Raise UserError if a source has too few tokens for training or validation."""
    fraction, context, evaluates = options.data.val_fraction, options.model.n_positions, options.train.eval_every
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"--data.val-fraction {fraction}: expected 0 <= fraction < 1")
    ways = "more text in --data.val-path" if data.val else "more text, a larger --data.val-fraction,"
    kept = 0.0 if data.val else fraction  # of each source
    found = [(files, files.count - int(files.count * kept), "training", "") for files in data.train.files]
    if evaluates:
        sources, share = (data.val.files, 1.0) if data.val else (data.train.files, kept)
        way = f" ({ways} or --train.eval-every 0)"
        found += [(files, int(files.count * share), "validation", way) for files in sources]
    for files, count, purpose, way in found:
        if count <= context:
            raise UserError(
                f"{files.source} has {count} tokens for {purpose}; a context of {context} needs {context + 1}{way}"
            )


def check_documents(files: TokenFiles) -> None:
    """Raise UserError if it is not known where documents begin in the training tokens. Raise OSError."""
    start = document_start(files.tokenizer)
    if start is None:
        kind = files.tokenizer.as_json()["kind"]
        raise UserError(
            f"--data.documents mask: the tokenizer {kind} has no token such as <|endoftext|> between documents: give"
            " another --data.tokenizer, or --data.documents attend"
        )
    tokens, looked = files.open(), 0
    while looked < min(len(tokens), _SEARCHED):
        if (tokens[looked : looked + _READ] == start).any():
            return
        looked += _READ
    raise UserError(
        f"--data.documents mask: none of the first {min(len(tokens), _SEARCHED)} tokens of {files.source} is token"
        f" {start}, with which documents begin: prepare them from a folder, jsonl or parquet, or give"
        " --data.documents attend"
    )
