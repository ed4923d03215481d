"""Token files (`tpfuse.train.token_layout`). Several files are concatenated to one sequence.

tpfuse writes llm.c's format, with uint32 for vocabularies above 65,536 tokens. `tpfuse prepare` writes a JSON file
beside it, with the tokenizer, the SHA-256 of the .bin file, and the token with which each document begins. Other token
files have no JSON file.

Several files are one sequence in the order of their names, and a window of tokens may begin in one file and end in the
next: batches do not depend on where the tokens were split. Scripts such as llm.c's fill a file to its last token and
continue the same document in the next one, so such a window is contiguous text.
"""

import hashlib
import itertools
import json
import os
import re
import resource
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tpfuse.checkpoint.durable import replace_file, sha256_of
from tpfuse.checkpoint.untrusted import EACH, Unreadable, read_json, read_pickle, reading
from tpfuse.errors import UserError, of_disk
from tpfuse.train.file_patterns import is_pattern, matches
from tpfuse.train.token_layout import DTYPES, HEADER_BYTES, SUFFIXES, VERSIONS, TokenLayout, token_layout
from tpfuse.train.tokenizer import CharTokenizer, Tokenizer, Tokens, document_start, from_json, token_dtype

_SAVE_EVERY = 5.0  # seconds between two records of an encoding's progress
_CHUNK = 1 << 24  # tokens in one read when a file is verified
_BLOCK = 2048  # tokens of each of the blocks by which a file without a JSON file is identified
_VALIDATION = re.compile(r"(^|[^a-z])val(id(ation)?)?([^a-z]|$)")


class DamagedTokens(OSError):
    """A token file ends too early, or a token is not in the vocabulary. The message names the file and the token."""


class _File:
    """The tokens of one file.

    They are read and not mapped: if a mapped file gets shorter, SIGBUS kills the process, while a read returns too few
    bytes, which is an error that can be reported.
    """

    def __init__(self, layout: TokenLayout, vocab_size: int) -> None:
        self.layout, self.path, self.count, self.vocab_size = layout, layout.path, layout.count, vocab_size
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        if layout.offset and os.pread(self._descriptor, layout.offset, 0) != layout.head:
            raise DamagedTokens(f"{self.path} has another header than before")

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop), which must be fewer than 2^28. Raise DamagedTokens."""
        width, offset = self.layout.width, self.layout.offset
        data = os.pread(self._descriptor, width * (stop - start), offset + width * start)
        if len(data) < width * (stop - start):
            left = max(0, os.fstat(self._descriptor).st_size - offset) // width
            raise DamagedTokens(f"{self.path} has become shorter: expected {self.count} tokens, found {left}")
        tokens: Tokens = np.frombuffer(data, dtype=f"<u{width}")  # a negative number becomes too large
        if len(tokens) and tokens.max() >= self.vocab_size:
            index, token = start + int(tokens.argmax()), int(tokens.max())
            negative = f", or {token - (1 << 8 * width)}," if width > 2 and token >> (8 * width - 1) else ""
            found = f"token {token}{negative} at {index} is outside the vocabulary of {self.vocab_size}"
            raise DamagedTokens(
                f"{self.path}: {found}: it is damaged, or another tokenizer has made it, which `tpfuse train` takes by"
                " --data.tokenizer"
            )
        return tokens.astype("<u4") if width == 8 else tokens


class FileTokens:
    """The tokens of concatenated files, or a contiguous part of them. A slice is read when it is indexed.

    Indexing raises DamagedTokens if a file has become shorter or has a token outside the vocabulary.
    """

    def __init__(self, files: Sequence[_File], start: int, stop: int) -> None:
        self._files, self._start, self._stop = files, start, stop
        self._ends = list(itertools.accumulate(file.count for file in files))

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int) -> "FileTokens":
        """Return tokens [start, stop) of this sequence without reading them."""
        return FileTokens(self._files, self._start + start, self._start + stop)

    def __getitem__(self, key: slice) -> Tokens:
        start, stop, step = key.indices(len(self))
        assert step == 1
        start, stop = self._start + start, self._start + stop
        slices = []
        index = bisect_right(self._ends, start)
        while start < stop:
            file, end = self._files[index], self._ends[index]
            begin = end - file.count
            slices.append(file.read(start - begin, min(stop, end) - begin))
            start, index = end, index + 1
        return slices[0] if len(slices) == 1 else np.concatenate([np.zeros(0, "<u2"), *slices])


@dataclass(frozen=True)
class TokenFiles:
    """Token files that are one sequence. source: a description of the text.

    sha256: the SHA-256 of the .bin file if there is one file with a JSON file, else that of `open_token_files`.
    """

    layouts: tuple[TokenLayout, ...]
    tokenizer: Tokenizer
    sha256: str
    source: str

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the paths of the files."""
        return tuple(layout.path for layout in self.layouts)

    @property
    def count(self) -> int:
        """Return the number of tokens of all files."""
        return sum(layout.count for layout in self.layouts)

    def open(self) -> FileTokens:
        """Open the files and return their tokens. Each process must open the files itself. Raise OSError."""
        return FileTokens(_opened(self.layouts, self.tokenizer.vocab_size), 0, self.count)

    def moved(self, folder: Path) -> "TokenFiles":
        """Move the one file, and the JSON file beside it, to a folder of the same disk. Raise OSError."""
        (layout,) = self.layouts
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / layout.path.name
        layout.path.with_suffix(".json").replace(path.with_suffix(".json"))
        layout.path.replace(path)  # comes last, so that the JSON file exists whenever the .bin file does
        return replace(self, layouts=(replace(layout, path=path),))


def _opened(layouts: Sequence[TokenLayout], vocab_size: int) -> list[_File]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len([*Path("/proc/self/fd").iterdir()]) + 1024 + 2 * len(layouts)  # what is open, will be, and the files
    if soft < count and soft != resource.RLIM_INFINITY:  # the usual limit is 1024 files; data may have more
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return [_File(layout, vocab_size) for layout in layouts]


def token_paths(path: Path) -> tuple[Path, ...] | None:
    """Return the token files that `--data.path` names, in the order of their names; None if it names text.

    They are a file NAME.bin or NAME.npy, such files of a folder, or the files that match a pattern. Raise UserError
    for a pattern that matches no file, for a pattern or a folder with other files or folders too, which would not be
    read, and for a folder with both training and validation files, such as llm.c's NAME_train_000001.bin and
    NAME_val_000000.bin.
    """
    try:
        if path.is_dir():
            present = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        elif is_pattern(path):
            present = matches(path)
        else:
            return (path,) if path.suffix in SUFFIXES else None
    except OSError as error:
        raise UserError(f"cannot read {of_disk(error)}") from None
    tokens = [file for file in present if file.suffix in SUFFIXES]
    described = {"tokenizer.json", *(f"{file.stem}.json" for file in tokens)}
    others = [file for file in present if file.suffix not in (*SUFFIXES, ".idx", ".pkl") and file.name not in described]
    if tokens and others:
        raise UserError(
            f"{path}: {tokens[0]} holds tokens, and {others[0]} does not: name one kind of file by a pattern"
        )
    if path.is_dir():
        _check_one_kind(path, tokens)
    return tuple(tokens) or None


def _check_one_kind(folder: Path, files: Sequence[Path]) -> None:
    validation = [file for file in files if _VALIDATION.search(file.stem.lower())]
    others = [file for file in files if file not in validation]
    if validation and others:
        raise UserError(
            f"{folder} holds {validation[0].name} beside {others[0].name}: name the files for training by a pattern,"
            f" such as --data.path '{folder}/*train*.bin', and the others by --data.val-path"
        )


class Progress:
    """Say how far the encoding of a text to folder/NAME.bin has come, which a later process continues.

    identity: a digest of what is encoded, and how; the progress of anything else is deleted. pieces, tokens: those
    that are encoded and written. Raise OSError.
    """

    def __init__(self, folder: Path, name: str, identity: str) -> None:
        self.path, self.identity, self.pieces, self.tokens = folder / f".progress-{name}.json", identity, 0, 0
        self._saved = time.monotonic()
        try:
            found = read_json(self.path, {"identity": str, "pieces": int, "tokens": int, "bytes": int})
            if found["identity"] == identity and _staging(folder, name).stat().st_size >= found["bytes"]:
                self.pieces, self.tokens = found["pieces"], found["tokens"]
        except (FileNotFoundError, Unreadable):
            pass
        if not self.tokens:
            self.path.unlink(missing_ok=True)  # what it describes will be overwritten

    def save(self, tokens: int, file: BinaryIO) -> None:
        """Record, every few seconds, that the file has this many tokens, which are on the disk then."""
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            file.flush()
            os.fsync(file.fileno())
            found = {"identity": self.identity, "pieces": self.pieces, "tokens": tokens, "bytes": file.tell()}
            replace_file(self.path, json.dumps(found))
            self._saved = time.monotonic()


def _staging(folder: Path, name: str) -> Path:
    return folder / f".staging-{name}.bin"


def write_token_file(
    folder: Path,
    tokens: Iterable[Tokens],
    tokenizer: Tokenizer,
    source: str,
    name: str = "tokens",
    progress: Progress | None = None,
) -> TokenFiles:
    """Write folder/NAME.bin and folder/NAME.json and return them. tokens: the parts of the sequence, in order.

    progress: the first `progress.tokens` tokens are written already, and if the process is interrupted, what is
    written is kept. Nothing of these names exists before all tokens are written. Raise OSError, and what `tokens`
    raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    dtype = token_dtype(tokenizer.vocab_size)
    magic = next(magic for magic, its in DTYPES.items() if its == dtype)
    path = folder / f"{name}.bin"
    staging = _staging(folder, name)
    count = 0 if progress is None else progress.tokens
    try:
        with staging.open("r+b" if count else "wb") as file:
            file.seek(HEADER_BYTES + count * dtype.itemsize)
            file.truncate()
            for part in tokens:
                file.write(part.astype(dtype).tobytes())
                count += len(part)
                if progress is not None:
                    progress.save(count, file)
            header[:2] = magic, VERSIONS[magic]
            header[2:4] = np.array([count], "<i8").view("<i4")
            file.seek(0)
            file.write(header.tobytes())
        digest = sha256_of(staging)
        description: dict[str, Any] = {
            "tokens": count,
            "vocab_size": tokenizer.vocab_size,
            "sha256": digest,
            "source": source,
            "document_start": document_start(tokenizer),
            "tokenizer": tokenizer.as_json(),
        }
        replace_file(path.with_suffix(".json"), json.dumps(description, ensure_ascii=False))
        staging.replace(path)  # comes last, so that the JSON file exists whenever the .bin file does
    except BaseException:
        if progress is None or not progress.path.exists():
            staging.unlink(missing_ok=True)
        raise
    if progress is not None:
        progress.path.unlink(missing_ok=True)
    layout = TokenLayout(path, HEADER_BYTES, dtype.itemsize, count, header.tobytes())
    return TokenFiles((layout,), tokenizer, digest, source)


def read_descriptions(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the contents of the JSON file beside each file; an empty list if no file has one.

    Raise UserError if only some files have one, and if they name different tokenizers.
    """
    if not any(path.with_suffix(".json").exists() for path in paths):
        return []
    descriptions: list[dict[str, Any]] = []
    for path in paths:
        beside = path.with_suffix(".json")
        try:
            descriptions.append(read_json(beside, {"tokenizer": {"kind": str}, "sha256": str}))
        except OSError as error:
            raise UserError(f"cannot read {beside}, which names the tokenizer of {path}: {error.strerror}") from None
        except Unreadable as error:
            raise UserError(f"{beside} is not what `tpfuse prepare` writes beside {path.name}: {error}") from None
        if descriptions[-1]["tokenizer"] != descriptions[0]["tokenizer"]:
            raise UserError(f"{path} has another tokenizer than {paths[0]}: one run takes one tokenizer")
    return descriptions


def stated_tokenizer(paths: Sequence[Path]) -> Tokenizer | None:
    """Return the tokenizer that files beside the token files name; None if there are none. Raise UserError.

    They are the JSON files, or meta.pkl of nanoGPT for files without a header.
    """
    described = read_descriptions(paths)
    meta = paths[0].parent / "meta.pkl"
    if not described and meta.is_file() and token_layout(paths[0]).headerless:
        return _of_nanogpt(meta)
    if not described:
        return None
    try:
        return from_json(described[0]["tokenizer"])
    except UserError as error:
        raise UserError(f"{paths[0].with_suffix('.json')}: {error}") from None


def _of_nanogpt(meta: Path) -> CharTokenizer:
    """Return the tokenizer of meta.pkl, which nanoGPT's prepare.py writes for characters. Raise UserError."""
    with reading(meta):
        characters = read_pickle(meta, {"itos": {EACH: str}})["itos"]
    text = "".join(characters.get(index, "") for index in range(len(characters)))
    if len(text) != len(characters) or text != "".join(sorted(set(text))):
        raise UserError(f"{meta}: expected single characters in sorted order, numbered from 0")
    return CharTokenizer(text)


def open_token_files(paths: tuple[Path, ...], tokenizer: Tokenizer) -> TokenFiles:
    """Check token files, whose tokenizer must be `tokenizer`, and return them. Files beside them may name none.

    A file with a JSON file is read once and compared with its SHA-256. A file without one gets a SHA-256 of its header
    and of four blocks of 2048 tokens, one of which is at its start and one at its end: a data set of 100 files with 100
    million tokens each would take minutes to read whenever a run starts, and the blocks suffice to notice that a run
    continues with other data. The digest of several files is that of their digests.

    Raise UserError for a missing or unreadable file, a wrong magic, version, length or SHA-256, a token outside the
    vocabulary, and another tokenizer.
    """
    layouts = tuple(map(token_layout, paths))
    described = read_descriptions(paths)
    theirs = stated_tokenizer(paths)
    if theirs is not None and theirs.as_json() != tokenizer.as_json():
        raise UserError(f"{paths[0]} has tokens of another tokenizer than the training data's")
    for layout in layouts:
        if layout.headerless and token_dtype(tokenizer.vocab_size).itemsize > layout.width:
            raise UserError(
                f"{layout.path} has no header and is read as uint16, but its tokenizer has {tokenizer.vocab_size}"
                " tokens: write its tokens as a NumPy array, NAME.npy"
            )
    digests = []
    try:
        for index, file in enumerate(_opened(layouts, tokenizer.vocab_size)):
            last = max(0, file.count - _BLOCK)
            starts, size = [last * number // 3 for number in range(4)], _BLOCK
            if described:
                starts, size = [*range(0, file.count, _CHUNK)], _CHUNK
            digest = hashlib.sha256(file.layout.head)
            for start in starts:
                digest.update(file.read(start, min(start + size, file.count)).tobytes())
            digests.append(digest.hexdigest())
            if described and digests[-1] != described[index]["sha256"]:
                stated = f"{file.path.with_suffix('.json').name} says {described[index]['sha256']}"
                raise UserError(f"{file.path}: SHA-256 {digests[-1]}, but {stated}")
    except OSError as error:
        raise UserError(of_disk(error)) from None
    source = f"{len(paths)} files, {paths[0]} to {paths[-1].name}" if len(paths) > 1 else str(paths[0])
    if len(described) == 1:
        source = str(described[0].get("source", source))
    whole = digests[0] if len(paths) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return TokenFiles(layouts, tokenizer, whole, source)
