"""Files that a user, a disk or a stranger may have changed: one way to read them, in which nothing is without bounds.

    description = read_json(path, {"tokenizer": dict, "sha256": str})

A schema is a type; a list of one schema, for lists whose entries all have it; or a dictionary of schemas by key, of
which all keys must be there and others may be. The key `EACH` stands for every key.
"""

import json
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST = 256 * 2**20  # bytes; the manifest of a model with a thousand ranks has a few
EACH = "*"
_QUOTED = 200  # characters of a file that a message may show
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class Unreadable(ValueError):
    """What is wrong with a file, in one line without the file's name."""


def quoted(value: object) -> str:
    """A value out of a file, for a message."""
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}… ({len(text)} characters)"


def check_regular(path: Path) -> int:
    """The size of a file in bytes, which is not opened: a pipe would make the reader wait.

    Raises Unreadable where it is no regular file, OSError where there is none.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"expected a regular file, found {_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}")
    return status.st_size


def read_bytes(path: Path, most: int | None = MOST) -> bytes:
    """The whole of a regular file of at most `most` bytes (None: of any size). Raises Unreadable and OSError."""
    size = check_regular(path)
    if most is not None and size > most:
        raise Unreadable(f"expected at most {most} bytes, found {size}")
    with path.open("rb") as file:
        return file.read() if most is None else file.read(most)


def read_text(path: Path) -> str:
    """UTF-8. Raises Unreadable and OSError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"expected UTF-8, found byte {error.object[error.start]:#04x} at {error.start}") from None


def read_json(path: Path, schema: Any) -> Any:
    """A JSON document that has the schema. Raises Unreadable and OSError."""
    return parsed_json(read_text(path), schema)


def parsed_json(text: str | bytes, schema: Any) -> Any:
    """`read_json`, of a text. Raises Unreadable."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected JSON, found text that {_refusal(error)}") from None
    check(document, schema)
    return document


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML document. Raises Unreadable and OSError."""
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
    """Raises Unreadable where a value does not have the schema."""
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
