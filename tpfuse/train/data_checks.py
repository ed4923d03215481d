"""Checks of a run's data, once it is read."""

from tpfuse.errors import UserError
from tpfuse.train.data import RunData
from tpfuse.train.options import DataOptions
from tpfuse.train.token_file import TokenFiles
from tpfuse.train.tokenizer import document_start

_SEARCHED = 1 << 26  # tokens in which a document must begin
_READ = 1 << 22  # tokens in one read


def check_data(data: RunData, options: DataOptions, context: int, *, evaluates: bool) -> None:
    """Raise UserError for sources without enough tokens, or without the documents that the options mask.

    context: the tokens of a sequence. Raise OSError.
    """
    ways = "more text in --data.val-path" if data.val else "more text, a larger --data.val-fraction,"
    kept = 0.0 if data.val else options.val_fraction  # of each source
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
    if options.documents == "mask":
        for files in data.train.files:
            _check_documents(files)


def _check_documents(files: TokenFiles) -> None:
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
