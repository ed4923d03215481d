"""Read files that a user, a disk or a stranger may have changed, with bounds on everything that is read.

    description = read_json(path, {"tokenizer": dict, "sha256": str})

A schema is one of three things: a type; a list of one schema, for a list whose entries all have that schema; or a
dictionary of schemas by key. All keys of the dictionary must be present, and other keys may be. The key `EACH` stands
for every key.
"""

import contextlib
import json
import pickle
import pickletools
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpfuse.errors import UserError

MOST = 256 * 2**20  # bytes; the manifest of a model with a thousand ranks has a few MiB
EACH = "*"
_QUOTED = 200  # the most characters of a file that a message shows
# The instructions of pickles that make numbers, texts, lists, tuples and dictionaries. Others can run any code or, as
# LONG_BINPUT with a large number does, fill the memory.
_PLAIN = frozenset(
    "PROTO FRAME STOP MARK MEMOIZE BINPUT BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE"
    " SHORT_BINUNICODE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2"
    " TUPLE3 LONG_BINGET".split()
)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class Unreadable(ValueError):
    """A file cannot be used. The message says why, in one line without the file's name."""


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Raise UserError, which names `what`, if something in the block raises OSError or Unreadable."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {what}: {error.strerror or error}") from None
    except Unreadable as error:
        raise UserError(f"cannot read {what}: {error}") from None


def quoted(value: object) -> str:
    """Return a value from a file in the form that messages show, which may be shortened."""
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}… ({len(text)} characters)"


def check_regular(path: Path) -> int:
    """Return the size of a file in bytes. The file is not opened, since a pipe would make the reader wait.

    Raise Unreadable if it is not a regular file, and OSError if it does not exist.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"expected a regular file, found {_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}")
    return status.st_size


def check_fetched(head: bytes) -> None:
    """Raise Unreadable if a file begins as those that Git keeps in the place of large files (git-lfs.com)."""
    if head.startswith(b"version https://git-lfs"):
        raise Unreadable("it is a pointer of Git LFS: get the file itself by git lfs pull")


def read_bytes(path: Path, most: int | None = MOST) -> bytes:
    """Return the bytes of a regular file, at most `most` of them (None: any number). Raise Unreadable and OSError."""
    size = check_regular(path)
    if most is not None and size > most:
        raise Unreadable(f"expected at most {most} bytes, found {size}")
    with path.open("rb") as file:
        data = file.read() if most is None else file.read(most)
    check_fetched(data)
    return data


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise Unreadable and OSError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"expected UTF-8, found byte {error.object[error.start]:#04x} at {error.start}") from None


def read_json(path: Path, schema: Any) -> Any:
    """Return a JSON document that has the schema. Raise Unreadable and OSError."""
    return parsed_json(read_text(path), schema)


def parsed_json(text: str | bytes, schema: Any) -> Any:
    """Return the JSON document in a text, which must have the schema. Raise Unreadable."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected JSON, found text that {_refusal(error)}") from None
    check(document, schema)
    return document


def read_pickle(path: Path, schema: Any) -> Any:
    """Return the plain containers in a pickle, which must have the schema. Raise Unreadable and OSError."""
    data = read_bytes(path)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            far = instruction.name == "LONG_BINPUT" and isinstance(argument, int) and argument < len(data)
            if instruction.name not in _PLAIN and not far:
                raise Unreadable(f"expected a pickle of plain containers, found the instruction {instruction.name}")
        document = pickle.loads(data)
    except Unreadable:
        raise
    except Exception as error:  # a damaged pickle raises any kind
        raise Unreadable(f"expected a pickle, found data that the parser rejects: {str(error)[:_QUOTED]}") from None
    check(document, schema)
    return document


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML document. Raise Unreadable and OSError."""
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"expected TOML, found text that {_refusal(error)}") from None


def _refusal(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return f"the parser rejects: {str(error)[:_QUOTED]}"


def check(value: object, schema: Any, where: str = "the document") -> None:
    """Raise Unreadable if a value does not have the schema."""
    kind = type(schema) if isinstance(schema, (dict, list)) else schema
    number = kind is float and isinstance(value, int)
    if not (isinstance(value, kind) or number) or (isinstance(value, bool) and kind is not bool):
        raise Unreadable(f"{where} is {quoted(value)}: expected {kind.__name__}")
    if isinstance(schema, list):
        assert isinstance(value, list)
        for index, entry in enumerate(value):
            check(entry, schema[0], f"entry {index} of {where}")
    if isinstance(schema, dict):
        assert isinstance(value, dict)
        if EACH in schema:
            schema = dict.fromkeys(value, schema[EACH])
        for key, inside in schema.items():
            if key not in value:
                raise Unreadable(f"{where} has no {key!r}")
            check(value[key], inside, f"{quoted(key)} of {where}")
