"""Documents in a file, read in parts: text, JSON lines, JSON, CSV and Parquet, compressed or not.

What a file is follows from its first bytes (compression, UTF-16, Parquet) and from its name without the suffix of the
compression; a file of another name is text. Only text comes in several pieces. A document of other files is the value
of one field of one record.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tpfuse.checkpoint.untrusted import MOST, check_fetched, check_regular, quoted, reading
from tpfuse.errors import UserError, optional_package

_PART = 1 << 20  # characters, or bytes, in one read
_ROWS = 1024  # rows of a Parquet file in one read
_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}  # byte order marks
_BINARY = {
    b"PK\x03\x04": "it is a zip archive: unpack it",
    b"7z\xbc\xaf": "it is a 7z archive: unpack it",
    b"\x04\x22\x4d\x18": "it is compressed by LZ4: unlz4 it",
    b"\x1f\x8b": "it is compressed twice: gunzip it",
    b"ARROW1": "it is an Arrow file: write it as Parquet",
    b"\xff\xff\xff\xff": "it is an Arrow stream: write it as Parquet, as to_parquet of datasets does",
    b"MMIDIDX": "it is Megatron's index: give the .bin beside it",
    b"%PDF": "it is a PDF: write its text by pdftotext",
}

_TEXTS = re.compile(r"(dictionary<values=)?(large_)?string")  # Arrow's names of its types of text
_CHATS = (("role", "content"), ("from", "value"))  # the fields of messages
_DELIMITERS = (",", ";", "\t", "|")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """A part of a document. ends: whether the document ends with it."""

    text: str
    ends: bool


class TextFile:
    """A file of documents. field: the field of records that has the text. is_text: whether the file is one text.

    Raise UserError if it is no regular file, or cannot be opened.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.field = path, field
        with reading(path):
            self.size = check_regular(path)
            with path.open("rb") as file:
                head = file.read(32)
            check_fetched(head)
        self._opened = next((opened for magic, opened in _COMPRESSIONS.items() if head.startswith(magic)), None)
        self.is_compressed, self.name = self._opened is not None, path.name.lower()
        if self.is_compressed and self.name.endswith(_SUFFIXES):
            self.name = self.name.rpartition(".")[0]
        self._read = _READERS.get(".parquet" if head.startswith(b"PAR1") else Path(self.name).suffix, _text)
        self.is_text = self._read is _text
        self._raw: IO[bytes] | None = None

    def position(self) -> int:
        """Return how many bytes of the file have been read."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    def open(self) -> IO[bytes]:
        """Return the file, decompressed. Raise OSError."""
        self._raw = self.path.open("rb")
        return self._raw if self._opened is None else self._opened(self._raw)

    def head(self) -> bytes:
        """Return the first bytes of the file, decompressed. Raise OSError."""
        with self.open() as file:
            return file.read(_PART)

    def text(self) -> io.TextIOWrapper:
        """Open the text in UTF-8, or in UTF-16 with a byte order mark, which is left out. Raise OSError."""
        head = self.head()
        encoding = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")
        return io.TextIOWrapper(self.open(), encoding=encoding, newline="")

    def pieces(self) -> Iterator[Piece]:
        """Yield the documents of the file. Empty and missing values are empty documents.

        Raise UserError, which names the file and says what to do.
        """
        try:
            yield from self._read(self)
        except UnicodeDecodeError as error:
            found = f"found byte {error.object[error.start]:#04x}"
            raise UserError(f"{self.path} is not UTF-8 text: {self._advice(found)}") from None
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(f"cannot read {self.path}: {error.strerror}") from None
            raise UserError(f"{self.path} is damaged or cut off: {error}: get it again") from None

    def _advice(self, found: str) -> str:
        """Return what to do with a file that is not UTF-8 text."""
        head = self.head()
        kind = next((kind for magic, kind in _BINARY.items() if head.startswith(magic)), None)
        if kind is not None or head[257:262] == b"ustar":
            return kind or "it is a tar archive: unpack it"
        encoding = "LATIN1"
        if b"\0" in head:
            found = "it has zero bytes, as binary files do"
            even, odd = (head[start::2].count(0) > len(head) / 4 for start in (0, 1))
            if even == odd:
                return f"{found}: expected text, records, or tokens in .bin or .npy"
            encoding = "UTF-16BE" if even else "UTF-16LE"
        paths = [shlex.quote(str(path)) for path in (self.path, self.path.with_name(f"utf8-{self.name}"))]
        command = f"iconv -f {encoding} -t UTF-8 {paths[0]} > {paths[1]}"
        if self.is_compressed:
            command = f"decompress it, then iconv -f {encoding} -t UTF-8"
        return f"{found}; if it is {encoding.replace('LATIN1', 'Latin-1')}, convert it: {command}"


def _text(file: TextFile) -> Iterator[Piece]:
    """Yield the parts of a text, which has been decoded to its end before the first one is yielded."""
    with file.text() as opened:
        parts = iter(lambda: opened.read(_PART), "")
        first, second = next(parts, ""), next(parts, "")
        if any("\0" in part for part in itertools.chain((first, second), parts)):
            raise UserError(f"{file.path} is not UTF-8 text: {file._advice('found a zero byte')}")
    if not second:
        yield Piece(first, True)
        return
    with file.text() as opened:
        part = opened.read(_PART)
        while part:
            following = opened.read(_PART)
            yield Piece(part, not following)
            part = following


def _document(file: TextFile, place: str, record: object, records: str = "") -> Piece:
    """Return the document of a record. Raise UserError if the record has no text in the field.

    records: the program of jq that makes records of the file, if its lines are none.
    """
    where, field, before = f"{file.path}, {place}", file.field, f"{records} | " if records else ""
    values: dict[str, object] = record if isinstance(record, dict) else {"": record}
    value: object = values.get(field, 0)
    if isinstance(value, str | None):
        return _checked(where, value or "")
    if chats := [name for name, value in values.items() if _is_chat(value)]:
        raise UserError(f"{where}: {_of_chat(chats[0])}")
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a record with a field {field!r}, found {quoted(record)}")
    if field in record:
        way = _selected(_texts(record[field], _step(field)), field)
        way = way or (f"{_step(field)} |= tostring" if isinstance(record[field], int | float) else "")
        hint = f", as {_jq(file, before + way)} writes it" if way else ""
        raise UserError(f"{where}: {field!r} is {quoted(record[field])}: expected text{hint}")
    found = [*_texts(record)]
    below = [text for text in found if text[1] == _step(field) or all(holder != "." for holder, _ in found)]
    if below:
        raise UserError(f"{where} has no field {field!r} but text below: {_jq(file, before + _selected(below, field))}")
    raise UserError(
        f"{where} has no field {field!r}: {_choice([str(x) for x in record if isinstance(record[x], str)])}"
    )


def _is_chat(value: object) -> bool:
    """Return whether a value is a list of messages, as OpenAI or ShareGPT write them."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(first.keys() >= set(names) for names in _CHATS)


def _of_chat(field: str) -> str:
    return (
        f"{f'field {field!r}' if field else 'the record'} holds a chat, and this is for plain text: apply the model's"
        " chat template by transformers, and train by ParallelTrainer, as examples/chat.py does"
    )


def _step(name: str) -> str:
    """Return the program of jq for the value of a field."""
    return f".{name}" if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f".{json.dumps(name)}"


def _texts(value: object, path: str = ".") -> Iterator[tuple[str, str]]:
    """Yield the texts in a value as programs of jq: what holds a text, and the text in that; the outer ones first.

    path: the program of the value. The entries of a list are taken to be alike.
    """
    level = [(path, value)]
    while level:
        below: list[tuple[str, object]] = []
        for path, holder in level:
            if isinstance(holder, list):
                inner = [(f"{path}[]", ".", f"{path}[]", entry) for entry in holder[:1]]
            else:
                fields = holder.items() if isinstance(holder, dict) else ()
                inner = [(path, _step(name), path.rstrip(".") + _step(name), entry) for name, entry in fields]
            yield from ((place, step) for place, step, _, entry in inner if isinstance(entry, str))
            below += [(program, entry) for _, _, program, entry in inner]
        level = below


def _selected(texts: Iterable[tuple[str, str]], field: str) -> str:
    """Return the program of jq that makes records of texts: of those in fields of this name, if there are some."""
    found = sorted(texts, key=lambda text: text[1] != _step(field))
    return f"{found[0][0]} | {{{_step(field)[1:]}: {found[0][1]}}}" if found else ""


def _jq(file: TextFile, program: str) -> str:
    """Return the command that writes what a program of jq makes of the file."""
    target = file.path.with_name(f"text-{Path(file.name).stem}.jsonl")
    command = f"jq -c {shlex.quote(program)} {shlex.quote(str(file.path))} > {shlex.quote(str(target))}"
    return f"decompress it, then jq -c {shlex.quote(program)}" if file.is_compressed else command


def _checked(where: str, text: str) -> Piece:
    """Return a document of text that UTF-8 can express. JSON can escape half of a surrogate pair."""
    if not text.isascii() and (half := _SURROGATE.search(text)):
        way = f"complete or delete its escape \\u{ord(half[0]):04x}"
        raise UserError(f"{where}: the text has half of a surrogate pair, which is no character: {way}")
    return Piece(text, True)


def _choice(names: list[str]) -> str:
    if not names:
        return "none of its fields holds text: write one that does"
    return f"choose one that holds text by --data.field: {', '.join(quoted(name)[1:-1] for name in names[:9])}"


def _parsed(file: TextFile, place: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        ways = "jq -c . writes a record a line, and jq -cR 'fromjson?' leaves out lines that are no JSON"
        raise UserError(f"{file.path}, {place}: expected JSON ({str(error)[:100]}): {ways}") from None


def _json_lines(file: TextFile) -> Iterator[Piece]:
    with file.text() as lines:
        for number in itertools.count(1):
            line = lines.readline(MOST)
            if len(line) == MOST:
                raise UserError(f"{file.path}, line {number} has more than {MOST} characters")
            if not line:
                return
            if line.strip():
                yield _document(file, f"line {number}", _parsed(file, f"line {number}", line))


def _json(file: TextFile) -> Iterator[Piece]:
    """Yield the records, or texts, of an array, or the records of lines, which many files of this name have."""
    with file.text() as opened:
        if not opened.read(_PART).lstrip().startswith("["):
            yield from _json_lines(file)
            return
    with file.text() as opened:
        text = opened.read(MOST)
    is_text = text.lstrip()[1:].lstrip().startswith('"')
    program = f".[] | {{{_step(file.field)[1:]}: .}}" if is_text else ".[]"
    if len(text) == MOST:
        raise UserError(f"{file.path} is too long for one JSON array: write a record a line: {_jq(file, program)}")
    records = _parsed(file, "an array", text)
    assert isinstance(records, list)
    for number, record in enumerate(records):
        where = f"entry {number}"
        if isinstance(record, str):
            yield _checked(f"{file.path}, {where}", record)
        else:
            yield _document(file, where, record, program)


def _delimiter(file: TextFile) -> str:
    """Return the delimiter of a table: one with which the first line names the field, or else the most columns.

    Spreadsheets of many languages write semicolons into .csv.
    """
    with file.text() as lines:
        first = lines.readline(MOST)
    usual = "\t" if file.name.endswith(".tsv") else ","
    names = {each: next(csv.reader([first], delimiter=each), []) for each in dict.fromkeys((usual, *_DELIMITERS))}
    return max(names, key=lambda each: (file.field in names[each], len(names[each])))


def _table(file: TextFile) -> Iterator[Piece]:
    csv.field_size_limit(MOST)
    delimiter = _delimiter(file)
    with file.text() as lines:
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            names = rows.fieldnames or []
            count = names.count(file.field)
            if names and count != 1:
                way = "rename all but one" if count else _choice([*names])
                found = f"{count or 'no'} columns {file.field!r} between {delimiter!r}"
                raise UserError(f"{file.path}: its first line names {found}: {way}")
            for row in rows:
                if None in row or None in row.values():
                    missing = f"expected {len(names)} values between {delimiter!r}, in quotes if they contain it"
                    raise UserError(f"{file.path}, line {rows.line_num}: {missing}")
                yield _document(file, f"line {rows.line_num}", row)
        except csv.Error as error:
            raise UserError(f"{file.path}, line {rows.line_num}: {error}") from None


def _parquet(file: TextFile) -> Iterator[Piece]:
    """Yield a column of text. The end of the file is read first, so a compressed one is decompressed to the disk."""
    needed = f"{file.path}, a Parquet file,"
    parquet, error = optional_package("pyarrow.parquet", needed), optional_package("pyarrow", needed).ArrowException
    with tempfile.TemporaryFile() as whole, file.open() as opened:
        if file.is_compressed:
            shutil.copyfileobj(opened, whole, _PART)
        try:
            table = parquet.ParquetFile(whole if file.is_compressed else opened)
            kinds = {column.name: str(column.type) for column in table.schema_arrow}
            texts = [name for name, kind in kinds.items() if _TEXTS.match(kind)]
            chats = [n for n, kind in kinds.items() if any(all(f"{x}: " in kind for x in names) for names in _CHATS)]
            if file.field not in texts and chats:
                raise UserError(f"{file.path}: {_of_chat(chats[0])}")
            if file.field not in texts:
                found = f" ({file.field!r} is {kinds[file.field]})" if file.field in kinds else ""
                raise UserError(f"{file.path} has no column {file.field!r} of text{found}: {_choice(texts)}")
            for batch in table.iter_batches(_ROWS, columns=[file.field]):
                for value in batch.column(0):
                    yield Piece(value.as_py() or "", True)
        except error as caught:
            raise UserError(f"{file.path} cannot be read as Parquet: {str(caught)[:200]}") from None


def _zstandard(raw: IO[bytes]) -> Any:
    """Return what the frames of zstd in a file hold. An OSError without a number says that one is cut short."""
    package = optional_package("pyarrow", "a file compressed by zstd")
    return package.CompressedInputStream(package.PythonFile(raw, mode="r"), "zstd")


_COMPRESSIONS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstandard,
}
_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_READERS: dict[str, Callable[[TextFile], Iterator[Piece]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
