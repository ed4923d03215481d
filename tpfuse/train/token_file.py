"""Token files in llm.c's .bin format. Several files are concatenated to one sequence.

A .bin file begins with 256 int32: a magic, a version, the number of tokens, then zeros. The tokens follow. With the
magic 20240520 and the version 1 they are uint16; with 20240801 and 7, which llm.c uses for Llama 3, they are uint32
(github.com/karpathy/llm.c, dev/data/data_common.py). tpfuse writes uint32 for vocabularies above 65,536 tokens.
`tpfuse prepare` writes a JSON file beside it, with the tokenizer and the SHA-256 of the .bin file. The files of llm.c
have no JSON file.

Several files are one sequence in the order of their names, and a window of tokens may begin in one file and end in the
next: batches do not depend on where the tokens were split. Scripts such as llm.c's fill a file to its last token and
continue the same document in the next one, so such a window is contiguous text.
"""

import glob
import hashlib
import itertools
import json
import os
import re
import resource
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpfuse.train.durable import replace_file
from tpfuse.train.errors import UserError, of_disk
from tpfuse.train.tokenizer import Tokenizer, Tokens, from_json, token_dtype
from tpfuse.train.untrusted import Unreadable, check_regular, read_json

HEADER_BYTES = 1024
VERSIONS = {20240520: 1, 20240801: 7}  # by magic, as the dtypes below
DTYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
_CHUNK = 1 << 24  # tokens that are written or verified at once
_BLOCK = 2048  # tokens of each of the blocks by which a file without a JSON file is identified
_VALIDATION = re.compile(r"(^|[^a-z])val(id(ation)?)?([^a-z]|$)")


class DamagedTokens(OSError):
    """A token file ends too early, or a token is not in the vocabulary. The message names the file and the token."""


class _File:
    """The tokens of one file.

    They are read and not mapped: if a mapped file gets shorter, SIGBUS kills the process, while a read returns too few
    bytes, which is an error that can be reported.
    """

    def __init__(self, path: Path, count: int, vocab_size: int) -> None:
        self.path, self.count, self.vocab_size = path, count, vocab_size
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        magic = int.from_bytes(os.pread(self._descriptor, 4, 0), "little")
        if magic not in DTYPES:
            raise DamagedTokens(f"{path} is not a token file any more: found magic {magic}")
        self.dtype = DTYPES[magic]

    def read(self, start: int, stop: int) -> Tokens:
        """Returns tokens [start, stop), which must be fewer than 2^29. Raises DamagedTokens."""
        width = self.dtype.itemsize
        data = os.pread(self._descriptor, width * (stop - start), HEADER_BYTES + width * start)
        if len(data) < width * (stop - start):
            left = max(0, os.fstat(self._descriptor).st_size - HEADER_BYTES) // width
            raise DamagedTokens(f"{self.path} has become shorter: expected {self.count} tokens, found {left}")
        tokens: Tokens = np.frombuffer(data, dtype=self.dtype)
        if len(tokens) and tokens.max() >= self.vocab_size:
            index, token = start + int(tokens.argmax()), int(tokens.max())
            raise DamagedTokens(f"{self.path}: token {token} at {index} is outside the vocabulary of {self.vocab_size}")
        return tokens


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
        """Returns tokens [start, stop) of this sequence without reading them."""
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
    """Token files that are one sequence. counts: the tokens of each file. source: a description of the text.

    sha256: the SHA-256 of the .bin file if there is one file with a JSON file, else that of `open_token_files`.
    """

    paths: tuple[Path, ...]
    counts: tuple[int, ...]
    tokenizer: Tokenizer
    sha256: str
    source: str

    @property
    def count(self) -> int:
        """Returns the number of tokens of all files."""
        return sum(self.counts)

    def open(self) -> FileTokens:
        """Opens the files and returns their tokens. Each process must open the files itself. Raises OSError."""
        return FileTokens(_opened(self.paths, self.counts, self.tokenizer.vocab_size), 0, self.count)


def _opened(paths: Sequence[Path], counts: Sequence[int], vocab_size: int) -> list[_File]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * len(paths) and soft != resource.RLIM_INFINITY:  # the usual limit is 1024 files; data may have more
        most = 2 * len(paths) if hard == resource.RLIM_INFINITY else min(2 * len(paths), hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return [_File(path, count, vocab_size) for path, count in zip(paths, counts, strict=True)]


def token_paths(path: Path) -> tuple[Path, ...] | None:
    """Returns the token files that `--data.path` names, in the order of their names; None if it names text.

    They are a file NAME.bin, the .bin files of a folder, or the files that match a pattern. Raises UserError for a
    pattern that matches no file or other files, and for a folder with both training and validation files, such as
    llm.c's NAME_train_000001.bin and NAME_val_000000.bin.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.glob("*.bin") if not file.name.startswith("."))
            _check_one_kind(path, files)
            return tuple(files) or None
        if glob.has_magic(str(path)) and not path.exists():
            return _matching(path)
    except OSError as error:
        raise UserError(f"cannot read {of_disk(error)}") from None
    return (path,) if path.suffix == ".bin" else None


def _matching(pattern: Path) -> tuple[Path, ...]:
    files = sorted(map(Path, glob.glob(str(pattern))))  # noqa: PTH207 - Path.glob would match hidden files
    if not files:
        raise UserError(f"no file matches {pattern}")
    for file in files:
        if file.suffix != ".bin":
            raise UserError(f"{pattern} matches {file}: a pattern names token files (.bin); for text name its folder")
    return tuple(files)


def _check_one_kind(folder: Path, files: Sequence[Path]) -> None:
    validation = [file for file in files if _VALIDATION.search(file.stem.lower())]
    others = [file for file in files if file not in validation]
    if validation and others:
        raise UserError(
            f"{folder} holds {validation[0].name} beside {others[0].name}: name the files for training by a pattern,"
            f" such as --data.path '{folder}/*train*.bin', and the others by --data.val-path"
        )


def write_token_file(
    folder: Path, tokens: Tokens, tokenizer: Tokenizer, source: str, name: str = "tokens"
) -> TokenFiles:
    """Writes folder/NAME.bin and folder/NAME.json and returns them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    dtype = token_dtype(tokenizer.vocab_size)
    magic = next(magic for magic, its in DTYPES.items() if its == dtype)
    header[:3] = magic, VERSIONS[magic], len(tokens)
    digest = hashlib.sha256()
    path = folder / f"{name}.bin"
    staging = folder / f".staging-{path.name}"
    with staging.open("wb") as file:
        chunks = (tokens[i : i + _CHUNK].astype(dtype) for i in range(0, len(tokens), _CHUNK))
        for data in (header.tobytes(), *(chunk.tobytes() for chunk in chunks)):
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
    staging.replace(path)  # comes last, so that the JSON file exists whenever the .bin file does
    return TokenFiles((path,), (len(tokens),), tokenizer, digest.hexdigest(), source)


def _read_header(path: Path) -> bytes:
    """Returns the header of a token file, checked against the length of the file. Raises UserError."""
    try:
        size = check_regular(path)
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"cannot read {path}: {error}") from None
    header = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<i4")
    if len(raw) < HEADER_BYTES or header[0] not in VERSIONS:
        found = f"magic {header[0]}" if len(header) else "an empty file"
        raise UserError(
            f"{path} is not a token file: found {found}, expected magic {' or '.join(map(str, VERSIONS))}"
            " (files of nanoGPT have no header: make one from the text with `tpfuse prepare`)"
        )
    magic, version, count = header[:3].tolist()
    if version != VERSIONS[magic]:
        raise UserError(f"{path}: version {version}, expected {VERSIONS[magic]} ({DTYPES[magic]} tokens)")
    expected = HEADER_BYTES + DTYPES[magic].itemsize * count
    if size != expected:
        raise UserError(f"{path}: {size} bytes, but {count} tokens need {expected}")
    return raw


def _read_description(path: Path) -> dict[str, Any]:
    """Returns the contents of the JSON file beside a token file. Raises UserError."""
    beside = path.with_suffix(".json")
    try:
        description: dict[str, Any] = read_json(beside, {"tokenizer": {"kind": str}, "sha256": str})
        return description
    except OSError as error:
        raise UserError(f"cannot read {beside}, which names the tokenizer of {path}: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"{beside} is not what `tpfuse prepare` writes beside {path.name}: {error}") from None


def _descriptions(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the contents of the JSON file beside each file; an empty list if no file has one.

    Raises UserError if only some files have one, and if they name different tokenizers.
    """
    if not any(path.with_suffix(".json").exists() for path in paths):
        return []
    descriptions = [_read_description(path) for path in paths]
    for path, description in zip(paths, descriptions, strict=True):
        if description["tokenizer"] != descriptions[0]["tokenizer"]:
            raise UserError(f"{path} has another tokenizer than {paths[0]}: one run takes one tokenizer")
    return descriptions


def stated_tokenizer(paths: Sequence[Path]) -> Tokenizer | None:
    """Returns the tokenizer that the JSON files name; None if there are none. Raises UserError."""
    described = _descriptions(paths)
    if not described:
        return None
    try:
        return from_json(described[0]["tokenizer"])
    except UserError as error:
        raise UserError(f"{paths[0].with_suffix('.json')}: {error}") from None


def open_token_files(paths: tuple[Path, ...], unnamed: Callable[[], Tokenizer]) -> TokenFiles:
    """Checks token files and returns them. unnamed: returns the tokenizer of files without a JSON file beside them.

    A file with a JSON file is read once and compared with its SHA-256. A file without one gets a SHA-256 of its header
    and of four blocks of 2048 tokens, one of which is at its start and one at its end: a data set of 100 files with 100
    million tokens each would take minutes to read whenever a run starts, and the blocks suffice to notice that a run
    continues with other data. The digest of several files is that of their digests.

    Raises UserError for a missing or unreadable file, a wrong magic, version, length or SHA-256, and a token outside
    the vocabulary.
    """
    headers = [_read_header(path) for path in paths]
    counts = tuple(int(np.frombuffer(header, dtype="<i4")[2]) for header in headers)
    described = _descriptions(paths)
    tokenizer = stated_tokenizer(paths) or unnamed()
    digests = []
    try:
        for index, file in enumerate(_opened(paths, counts, tokenizer.vocab_size)):
            ranges = _whole(file.count) if described else _blocks(file.count)
            digest = hashlib.sha256(headers[index])
            for start, stop in ranges:
                digest.update(file.read(start, stop).tobytes())
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
    return TokenFiles(paths, counts, tokenizer, whole, source)


def _whole(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]


def _blocks(count: int) -> list[tuple[int, int]]:
    last = max(0, count - _BLOCK)
    return [(last * index // 3, min(last * index // 3 + _BLOCK, count)) for index in range(4)]
