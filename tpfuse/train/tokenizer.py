"""Tokenizers: bytes, characters, files of the `tokenizers` library, and models of the sentencepiece library.

Each of these libraries is imported where it is used: `tpfuse verify` trains without them.
"""

import base64
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from tpfuse.checkpoint.untrusted import (
    Unreadable,
    check,
    parsed_json,
    quoted,
    read_bytes,
    read_json,
    read_text,
    reading,
)
from tpfuse.errors import UserError, hub_hint, optional_package, refusing

Tokens = npt.NDArray[np.unsignedinteger[Any]]  # of the dtype that `token_dtype` returns
_GPT2_MODEL = "openai-community/gpt2"
# The token that ends a text, in GPT-2 and Qwen, Llama 3, Llama and T5, Gemma, DeepSeek, Cohere.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>")
_SAVE = "write the tokenizer's folder by save_pretrained of transformers' AutoTokenizer"
_NEAR = 500  # characters on each side of a cut
_CUTS = 8  # cuts that are tried


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of a vocabulary's token ids in memory and in token files, uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenSequence(Protocol):
    """A sequence of token ids that is read by slices: an array, or `tpfuse.train.token_file.FileTokens`."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> Tokens: ...


class Tokenizer(Protocol):
    """Convert text to token ids and back. `from_json` builds an equal tokenizer from the result of `as_json`.

    begins: the tokens with which a text begins (BOS), if the model expects any. end_of_text: the token that ends a
    text; None if there is none.
    """

    vocab_size: int
    begins: tuple[int, ...] = ()
    end_of_text: int | None = None

    def encode(self, text: str) -> Tokens:
        """Return the token ids of `text` alone. Raise UserError for text that the vocabulary cannot express."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of each text, as `encode` does. A tokenizer has one of the two."""
        return [self.encode(text) for text in texts]

    def cut(self, text: str) -> int:
        """Return a place, after a line break, at which the tokens of `text` are those of its two parts; 0 for none.

        A long text can so be encoded part by part. Tokenizers of the kind of GPT-2 cut texts into words first, so that
        tokens depend on near characters alone. Those that put a space before each text, such as Llama's, have no such
        place.
        """
        place = len(text)
        for _ in range(_CUTS):
            place = text.rfind("\n", 1, max(1, place - 1)) + 1
            if not place:
                return 0
            left, right = text[max(0, place - _NEAR) : place], text[place : place + _NEAR]
            if not right:
                continue
            whole, *parts = self.encode_all([left + right, left, right])
            if np.array_equal(whole, np.concatenate(parts)):
                return place
        return 0

    def decode(self, tokens: list[int]) -> str:
        """Return the text of `tokens`. Bytes that are not UTF-8 become the replacement character.

        So do tokens that a model has and the tokenizer does not; the tokenizers library leaves them out.
        """

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary for `from_json`."""


class ByteTokenizer(Tokenizer):
    """A tokenizer whose 256 tokens are the bytes of UTF-8."""

    vocab_size = 256

    def cut(self, text: str) -> int:
        return len(text)

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return bytes(min(token, 255) for token in tokens).decode("utf-8", errors="replace")  # 255 is never UTF-8

    def as_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharTokenizer(Tokenizer):
    """A tokenizer whose tokens are the distinct characters of a text in sorted order, as nanoGPT numbers them."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self._points = np.array([ord(c) for c in characters], dtype=np.uint32)

    def cut(self, text: str) -> int:
        return len(text)

    @classmethod
    def of_text(cls, texts: Iterable[str]) -> Self:
        """Return the tokenizer of the characters in all texts."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls("".join(sorted(characters)))

    def encode(self, text: str) -> Tokens:
        points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        known = self._points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            found = f"the character {chr(points[~known][0])!r} is not among the {self.vocab_size} of the text"
            raise UserError(f"{found}: leave it out, or train with --data.tokenizer bytes")
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[token] if token < self.vocab_size else "\ufffd" for token in tokens)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "chars", "characters": self.characters}


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, kept as its JSON text.

    Its truncation and padding are switched off: they are for the inputs of one forward pass, and would cut a text to
    its first tokens. `begins` and `end_of_text` are what its post-processor puts around a text; if it ends none, the
    token of a usual name does. A text with a character that the model would leave out without a word is refused.
    """

    def __init__(self, text: str) -> None:
        import tokenizers

        self._text = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # its numbers may have gaps
        self._known = _known_characters(self._tokenizer.model, vocabulary)
        whole = self._tokenizer.encode("a").ids
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        places = range(len(whole) - len(plain) + 1)
        start = next((at for at in places if whole[at : at + len(plain)] == plain), 0)
        after = whole[start + len(plain) :]
        named = (self._tokenizer.token_to_id(name) for name in _ENDS)
        self.begins = tuple(whole[:start])
        self.end_of_text = after[-1] if after else next((id for id in named if id is not None), None)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        if self._known is not None:
            self._check_known(texts, self._known)
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # it is text from a command line with bytes that are not UTF-8
            raise UserError("the text is not UTF-8: convert it, or train with --data.tokenizer bytes") from None
        except Exception as error:  # the library raises plain Exception for a text that it cannot encode
            raise UserError(f"the tokenizer cannot encode the text: {str(error)[:200]}: {_SAVE}") from None
        return [np.array(encoding.ids, dtype=token_dtype(self.vocab_size)) for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "json": self._text}

    def _check_known(self, texts: Sequence[str], known: frozenset[str]) -> None:
        """Raise UserError if a text has a character that is not known."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        for text in texts:
            normal = normalizer.normalize_str(text) if normalizer else text
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(normal)] if pre_tokenizer else [normal]
            unknown = set().union(*words) - known
            if unknown:
                raise UserError(
                    f"the tokenizer knows no {min(unknown)!r} and has no token for unknown characters: train it with an"
                    " unk_token, or byte-level with initial_alphabet=ByteLevel.alphabet()"
                )


def _known_characters(model: Any, vocabulary: dict[str, int]) -> frozenset[str] | None:
    """Return the characters that a model takes if it leaves out others, as a BPE without unk_token; else None."""
    import tokenizers

    if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None or model.byte_fallback:
        return None
    known = frozenset("".join(vocabulary))
    return None if known >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) else known


class SentencePieceTokenizer(Tokenizer):
    """A model of the sentencepiece library (tokenizer.model), kept as its bytes. Raise Unreadable for other bytes."""

    def __init__(self, model: bytes) -> None:
        self._model = model
        package = optional_package("sentencepiece", "a sentencepiece model")
        if not model:
            raise Unreadable("expected a sentencepiece model, found an empty file: get it again")
        try:
            self._processor = package.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise Unreadable(
                "expected a sentencepiece model; that of Llama 3 is one of tiktoken: give its tokenizer.json"
            ) from None
        self.vocab_size = self._processor.vocab_size()
        begin, end = self._processor.bos_id(), self._processor.eos_id()
        self.begins = () if begin < 0 else (int(begin),)
        self.end_of_text = None if end < 0 else int(end)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._model,)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        try:
            ids = self._processor.encode(list(texts), add_bos=False, add_eos=False)
        except UnicodeEncodeError:
            raise UserError("the text is not UTF-8: convert it, or train with --data.tokenizer bytes") from None
        return [np.array(each, dtype=token_dtype(self.vocab_size)) for each in ids]

    def decode(self, tokens: list[int]) -> str:
        known = (token for token in tokens if token < self.vocab_size)
        return str(self._processor.decode(list(known)))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", "model": base64.b64encode(self._model).decode()}


def from_json(description: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `as_json` has described. Raise UserError for another description."""
    kinds: dict[object, tuple[str, Callable[[str], Tokenizer]]] = {
        "chars": ("characters", CharTokenizer),
        "tokenizers": ("json", lambda text: _of_library(text, "the tokenizer's json")),
        "sentencepiece": ("model", lambda text: SentencePieceTokenizer(base64.b64decode(text))),
    }
    kind = description.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind not in kinds:
        raise UserError(f"tokenizer kind {quoted(kind)} is not known: expected bytes, {', '.join(map(str, kinds))}")
    field, made = kinds[kind]
    with refusing():
        check(description, {field: str}, "the tokenizer")
        return made(description[field])


def _of_library(text: str, source: object) -> FileTokenizer:
    """Return the library's tokenizer of a JSON text. Raise UserError for a text that the library does not accept."""
    try:
        return FileTokenizer(text)
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception for a text that it cannot use
        found = str(error)[:200]
        raise UserError(f"{source} is not a tokenizer of the tokenizers library: {found}: {_SAVE}") from None


def build_tokenizer(name: str, texts: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer that `--data.tokenizer` names. Raise UserError.

    texts: what chars takes its characters from; no other tokenizer reads them.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "chars":
        return CharTokenizer.of_text(texts)
    if name == "gpt2":
        return _gpt2()
    path = Path(name)
    path = _in_folder(path) if path.is_dir() else path
    with reading(f"the tokenizer {path}"):
        if path.suffix == ".model":
            return SentencePieceTokenizer(read_bytes(path))
        if path.suffix == ".json":
            return _of_file(read_text(path), str(path))
    raise UserError(
        f"tokenizer {name!r} is not known: expected bytes, chars, gpt2, a FILE.json, a FILE.model or the folder of one"
        + hub_hint(name, f"{name} tokenizer.json")
    )


def _in_folder(folder: Path) -> Path:
    """Return the tokenizer's file in a Hugging Face folder. Raise UserError if there is none that can be used."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        settings = folder / "tokenizer_config.json"
        kind = read_json(settings, {}).get("tokenizer_class") if settings.is_file() else None
        kind = kind if isinstance(kind, str) and kind.isidentifier() else "GPT2Tokenizer"
        code = f"from transformers import {kind}; {kind}.from_pretrained('{folder}').save_pretrained('{folder}')"
        raise UserError(
            f"{folder} has vocab.json and merges.txt, which do not say how words are cut: write its tokenizer.json by"
            f' python -c "{code}"'
        )
    raise UserError(f"{folder} holds no tokenizer: expected tokenizer.json or tokenizer.model: {_SAVE}")


def _of_file(text: str, name: str) -> Tokenizer:
    """Return the tokenizer of a run's tokenizer.json, or of a file of the library. Raise UserError."""
    try:
        description = parsed_json(text, {"kind": str})
    except Unreadable:
        return _of_library(text, name)
    try:
        return from_json(description)
    except UserError as error:
        raise UserError(f"cannot read the tokenizer {name}: {error}") from None


def document_start(tokenizer: Tokenizer) -> int | None:
    """Return the token with which each document of a token file begins; None if no token separates documents.

    It is the first of `begins`. Without one, it is the token that ends the document before: in the inputs of a model it
    stands before the document's first token, as it does when a text is sampled.
    """
    return tokenizer.begins[0] if tokenizer.begins else tokenizer.end_of_text


def _gpt2() -> FileTokenizer:
    """Return GPT-2's tokenizer from the cache of the Hugging Face hub, or from the hub itself."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

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
