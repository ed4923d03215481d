"""Token files: llm.c's .bin with a JSON beside it that holds the tokenizer and a SHA-256.

The .bin begins with 256 int32: the magic 20240520, the version 1, the number of tokens, then zeros; uint16
tokens follow (github.com/karpathy/llm.c, dev/data). Read as a memory map, so ranks share one copy.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpfuse.train.durable import replace_file
from tpfuse.train.errors import UserError
from tpfuse.train.tokenizer import Tokenizer, Tokens, from_json
from tpfuse.train.untrusted import Unreadable, check_regular, read_json

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
_CHUNK = 1 << 24  # tokens looked at in one go


@dataclass(frozen=True)
class TokenFile:
    """tokens: [n] uint16, mapped; sha256: of the .bin file, as its JSON states it."""

    path: Path
    tokens: Tokens
    tokenizer: Tokenizer
    sha256: str
    source: str

    def split(self, val_fraction: float) -> tuple[Tokens, Tokens]:
        """(training, validation): the last `val_fraction` of the tokens are for validation."""
        border = len(self.tokens) - int(len(self.tokens) * val_fraction)
        return self.tokens[:border], self.tokens[border:]


def write_token_file(folder: Path, tokens: Tokens, tokenizer: Tokenizer, source: str) -> TokenFile:
    """Writes folder/tokens.bin and folder/tokens.json and maps them."""
    folder.mkdir(parents=True, exist_ok=True)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    digest = hashlib.sha256()
    path = folder / "tokens.bin"
    staging = folder / ".staging-tokens.bin"
    with staging.open("wb") as file:
        for data in (header.tobytes(), *(tokens[i : i + _CHUNK].tobytes() for i in range(0, len(tokens), _CHUNK))):
            digest.update(data)
            file.write(data)
    description: dict[str, Any] = {
        "tokens": len(tokens),
        "vocab_size": tokenizer.vocab_size,
        "sha256": digest.hexdigest(),
        "source": source,
        "tokenizer": tokenizer.as_json(),
    }
    replace_file(path.with_suffix(".json"), json.dumps(description, ensure_ascii=False))
    staging.replace(path)  # at last, so that where it is all is there
    return open_token_file(path, verify=False)


def _read_description(path: Path) -> dict[str, Any]:
    beside = path.with_suffix(".json")
    try:
        description: dict[str, Any] = read_json(beside, {"tokenizer": {"kind": str}, "sha256": str})
        return description
    except OSError as error:
        raise UserError(f"cannot read {beside}, which tells the tokenizer of {path}: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"{beside} is not what `tpfuse prepare` writes beside {path.name}: {error}") from None


def open_token_file(path: Path, *, verify: bool = True) -> TokenFile:
    """Maps a token file; `verify` reads it once and compares the SHA-256 and the largest token.

    Raises UserError for a missing or unreadable file, a wrong magic, version, length or SHA-256, and a token
    outside the vocabulary.
    """
    try:
        size = check_regular(path)
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if len(header) < HEADER_BYTES // 4 or header[0] != MAGIC:
        found = f"magic {header[0]}" if len(header) else "an empty file"
        raise UserError(f"{path} is not a token file: found {found}, expected magic {MAGIC}")
    if header[1] != VERSION:
        raise UserError(f"{path}: version {header[1]}, expected {VERSION} (uint16 tokens)")
    count = int(header[2])
    if size != HEADER_BYTES + 2 * count:
        raise UserError(f"{path}: {size} bytes, but {count} tokens need {HEADER_BYTES + 2 * count}")
    description = _read_description(path)
    try:
        tokenizer = from_json(description["tokenizer"])
    except UserError as error:
        raise UserError(f"{path.with_suffix('.json')}: {error}") from None
    tokens = (
        np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,)) if count else np.zeros(0, "<u2")
    )
    if verify:
        _verify(path, tokens, header.tobytes(), tokenizer.vocab_size, description["sha256"])
    return TokenFile(path, tokens, tokenizer, description["sha256"], str(description.get("source", path)))


def _verify(path: Path, tokens: Tokens, header: bytes, vocab_size: int, expected: str) -> None:
    digest = hashlib.sha256(header)
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        digest.update(chunk.tobytes())
        if int(chunk.max()) >= vocab_size:
            place = start + int(chunk.argmax())
            raise UserError(f"{path}: token {int(chunk.max())} at {place} is outside the vocabulary of {vocab_size}")
    if digest.hexdigest() != expected:
        raise UserError(f"{path}: SHA-256 {digest.hexdigest()}, but {path.with_suffix('.json').name} says {expected}")
