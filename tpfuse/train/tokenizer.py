"""Tokenizers: bytes, characters, and files of the `tokenizers` library."""

import logging
import socket
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tpfuse.train.errors import UserError
from tpfuse.train.untrusted import Unreadable, check, parsed_json, quoted, read_text

Tokens = npt.NDArray[np.unsignedinteger[Any]]  # of the dtype that `token_dtype` returns
_GPT2_MODEL = "openai-community/gpt2"
END_OF_TEXT = "<|endoftext|>"  # as GPT-2 names it


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the dtype of a vocabulary's token ids in memory and in token files, uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenSequence(Protocol):
    """A sequence of token ids that is read by slices: an array, or `tpfuse.train.token_file.FileTokens`."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> Tokens: ...


class Tokenizer(Protocol):
    """Converts text to token ids and back. `from_json` builds an equal tokenizer from the result of `as_json`.

    end_of_text: the token that ends a text; None if there is none.
    """

    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> Tokens:
        """Returns the token ids of `text`. Raises UserError for text that the vocabulary cannot express."""

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of `tokens`. Bytes that are not UTF-8 become the replacement character.

        So do tokens that a model has and the tokenizer does not; the tokenizers library leaves them out.
        """

    def as_json(self) -> dict[str, Any]:
        """Returns a dictionary for `from_json`."""


class ByteTokenizer:
    """A tokenizer whose 256 tokens are the bytes of UTF-8."""

    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return bytes(min(token, 255) for token in tokens).decode("utf-8", errors="replace")  # 255 is never UTF-8

    def as_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharTokenizer:
    """A tokenizer whose tokens are the distinct characters of a text in sorted order, as nanoGPT numbers them."""

    end_of_text: int | None = None

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self._points = np.array([ord(c) for c in characters], dtype=np.uint32)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Returns the tokenizer of a text. Raises UserError if it has more than 65,536 different characters."""
        characters = "".join(sorted(set(text)))
        return cls(characters)

    def encode(self, text: str) -> Tokens:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        known = self._points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            raise UserError(f"the character {chr(points[~known][0])!r} is not among the {self.vocab_size} of the text")
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[token] if token < self.vocab_size else "\ufffd" for token in tokens)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "chars", "characters": self.characters}


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, kept as its JSON text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.end_of_text: int | None = self._tokenizer.token_to_id(END_OF_TEXT)

    def encode(self, text: str) -> Tokens:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "json": self._text}


def from_json(description: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer that `as_json` has described. Raises UserError for another description."""
    kind = description.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    try:
        if kind == "chars":
            check(description, {"characters": str}, "the tokenizer")
            return CharTokenizer(description["characters"])
        if kind == "tokenizers":
            check(description, {"json": str}, "the tokenizer")
            return _of_library(description["json"], "the tokenizer's json")
    except Unreadable as error:
        raise UserError(str(error)) from None
    raise UserError(f"tokenizer kind {quoted(kind)} is not known: expected bytes, chars or tokenizers")


def _of_library(text: str, source: object) -> FileTokenizer:
    """Returns the library's tokenizer of a JSON text. Raises UserError for a text that the library does not accept."""
    try:
        return FileTokenizer(text)
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception for a text that it cannot use
        raise UserError(f"{source} is not a tokenizer of the tokenizers library: {str(error)[:200]}") from None


def build_tokenizer(name: str, text: str) -> Tokenizer:
    """Returns the tokenizer that `--data.tokenizer` names, for `text`. Raises UserError."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "chars":
        return CharTokenizer.of_text(text)
    if name == "gpt2":
        return _gpt2()
    if name.endswith(".json"):
        try:
            text = read_text(Path(name))
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {name}: {error.strerror}") from None
        except Unreadable as error:
            raise UserError(f"cannot read the tokenizer {name}: {error}") from None
        return _of_file(text, name)
    raise UserError(f"tokenizer {name!r} is not known: expected bytes, chars, gpt2 or a FILE.json")


def _of_file(text: str, name: str) -> Tokenizer:
    """Returns the tokenizer of a run's tokenizer.json, or of a file of the library. Raises UserError."""
    try:
        description = parsed_json(text, {"kind": str})
    except Unreadable:
        return _of_library(text, name)
    try:
        return from_json(description)
    except UserError as error:
        raise UserError(f"cannot read the tokenizer {name}: {error}") from None


def _gpt2() -> FileTokenizer:
    """Returns GPT-2's tokenizer from the cache of the Hugging Face hub, or from the hub itself."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it reports every retry
    try:
        try:
            file = hf_hub_download(_GPT2_MODEL, "tokenizer.json", local_files_only=True)
        except LocalEntryNotFoundError:
            socket.getaddrinfo("huggingface.co", 443)  # fails at once without a network; the hub retries for long
            file = hf_hub_download(_GPT2_MODEL, "tokenizer.json")
        return FileTokenizer(Path(file).read_text(encoding="utf-8"))
    except (OSError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise UserError(
            f"the gpt2 tokenizer cannot be downloaded ({str(error).splitlines()[0]}): on a machine with a network get"
            f" tokenizer.json of {_GPT2_MODEL} from the Hugging Face hub and pass --data.tokenizer tokenizer.json,"
            " or train on bytes with --data.tokenizer bytes"
        ) from None
