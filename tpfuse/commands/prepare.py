"""`tpfuse prepare` turns text into a token file, which `tpfuse train` reads from the disk."""

from tpfuse.errors import UserError
from tpfuse.train.corpus import characters, find_text
from tpfuse.train.data import encode_text
from tpfuse.train.options import PrepareCommand
from tpfuse.train.token_file import read_descriptions, token_paths
from tpfuse.train.tokenizer import build_tokenizer


def prepare(options: PrepareCommand) -> str:
    """Write the token file of `tpfuse prepare` and return a line that describes it. Raise UserError."""
    if (options.out / "tokens.bin").exists():
        raise UserError(f"{options.out / 'tokens.bin'} exists: choose another --out")
    try:
        read_descriptions((options.out / "tokens.bin",))  # one is there without its tokens if a prepare was interrupted
    except UserError as error:
        raise UserError(f"{error}: choose another --out") from None
    data = options.data
    if data.path is not None and token_paths(data.path):
        raise UserError(f"{data.path} holds tokens, which `tpfuse train` reads as they are: give it --data.path")
    text = find_text(data.path, data.field)
    try:
        file = encode_text(options.out, text, build_tokenizer(data.tokenizer, characters([text])), continues=True)
    except OSError as error:
        raise UserError(f"cannot write {options.out}: {error.strerror}") from None
    return f"{file.paths[0]}: {file.count} tokens of {file.source}, vocabulary {file.tokenizer.vocab_size}"
