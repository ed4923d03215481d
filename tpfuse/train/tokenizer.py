"""Tokenizers: bytes, characters, and files of the `tokenizers` library."""

import json
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import tokenizers

from tpfuse.train.errors import UserError

Tokens = npt.NDArray[np.uint16]
LARGEST = 2**16  # token numbers are stored in 16 bits


class Tokenizer(Protocol):
    """Text to token numbers and back; `as_json` is all that is needed to make it again."""

    vocab_size: int

    def encode(self, text: str) -> Tokens:
        """Raises UserError for text that the vocabulary cannot express."""

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are no UTF-8 become the replacement character."""

    def as_json(self) -> dict[str, Any]:
        """A dictionary for `from_json`."""


class ByteTokenizer:
    """UTF-8 bytes: 256 tokens."""

    vocab_size = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def as_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharTokenizer:
    """The distinct characters of a text in sorted order, as nanoGPT numbers them."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self._points = np.array([ord(c) for c in characters], dtype=np.uint32)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The tokenizer of this text. Raises UserError where it has more than 65,536 different characters."""
        characters = "".join(sorted(set(text)))
        if len(characters) > LARGEST:
            raise UserError(f"the text has {len(characters)} different characters; at most {LARGEST} fit 16 bits")
        return cls(characters)

    def encode(self, text: str) -> Tokens:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        places = np.searchsorted(self._points, points)
        known = self._points[np.minimum(places, self.vocab_size - 1)] == points
        if not known.all():
            raise UserError(f"the character {chr(points[~known][0])!r} is not among the {self.vocab_size} of the text")
        return places.astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "chars", "characters": self.characters}


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, kept as its JSON text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self.vocab_size = self._tokenizer.get_vocab_size()
        if self.vocab_size > LARGEST:
            raise UserError(f"the tokenizer has {self.vocab_size} tokens; at most {LARGEST} fit 16 bits")

    def encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "json": self._text}


def from_json(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `as_json` described. Raises UserError for another description."""
    kind = description.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "chars":
        return CharTokenizer(description["characters"])
    if kind == "tokenizers":
        return FileTokenizer(description["json"])
    raise UserError(f"tokenizer kind {kind!r} is not known: expected bytes, chars or tokenizers")


def build_tokenizer(name: str, text: str) -> Tokenizer:
    """The tokenizer `--data.tokenizer` names, for `text`. Raises UserError."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "chars":
        return CharTokenizer.of_text(text)
    if name == "gpt2":
        return _gpt2()
    if name.endswith(".json"):
        try:
            with open(name, encoding="utf-8") as file:  # noqa: PTH123
                content = file.read()
            json.loads(content)
            return FileTokenizer(content)
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {name}: {error.strerror}") from None
        except UserError:
            raise
        except Exception as error:  # the library raises plain Exception for a file it cannot use
            raise UserError(f"{name} is not a file of the tokenizers library: {error}") from None
    raise UserError(f"tokenizer {name!r} is not known: expected bytes, chars, gpt2 or a FILE.json")


def _gpt2() -> FileTokenizer:
    try:
        return FileTokenizer(tokenizers.Tokenizer.from_pretrained("gpt2").to_str())
    except Exception as error:  # the library raises plain Exception when it cannot download
        raise UserError(
            "the gpt2 tokenizer could not be downloaded: get tokenizer.json of the model gpt2 from the Hugging Face"
            " hub on a machine with a network and pass --data.tokenizer tokenizer.json, or take --data.tokenizer bytes"
            f" ({str(error).splitlines()[0]})"
        ) from None
