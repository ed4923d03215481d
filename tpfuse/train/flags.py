"""The flags of a class of options, and a parser that needs the library alone, for commands that examine the machine."""

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from tpfuse.checkpoint.untrusted import quoted
from tpfuse.errors import UserError
from tpfuse.nearest import nearest

T = TypeVar("T")
HELP = {"-h", "--help", "--help-all"}


def key_of(field: str) -> str:
    """Return the key of a field in TOML. A field that would be a keyword of Python, such as from, ends in _."""
    return field.rstrip("_")


def flags_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (flag without leading dashes, type) for every leaf of a dataclass of options."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint = hints[item.name]
        name = prefix + key_of(item.name).replace("_", "-")
        if isinstance(hint, type) and is_dataclass(hint):
            yield from flags_of(hint, name + ".")
        else:
            yield name, hint


def check_paths(kind: type, arguments: Sequence[str]) -> None:
    """Raise UserError for an option that is an empty path, as an unset variable of a shell is: it would mean "."."""
    paths = {f"--{name}" for name, hint in flags_of(kind) if Path in (hint, *get_args(hint))}
    for index, word in enumerate(arguments):
        flag, joined, given = word.partition("=")
        empty = not given if joined else "" in arguments[index + 1 : index + 2]
        if empty and flag.replace("_", "-") in paths:
            raise UserError(f"{flag} '': expected a path")


def unknown(kind: type, word: str, arguments: Sequence[str], command: str) -> str:
    """Return what is wrong with a word of the command line that is neither an option nor its value."""
    switches = [each for each in arguments if each.startswith("--") and each.partition("=")[1:] == ("=", word)]
    if switches and word not in arguments:
        return f"{switches[0]}: {switches[0].partition('=')[0]} takes no value; --help lists what switches it off"
    if not word.startswith("-"):
        before = [each for each in arguments[: arguments.index(word)] if each.startswith("--")][-1:]
        after = f" after {before[0]}, which takes one value: put a pattern in quotes" if before else ""
        return f"unexpected {quoted(word)}{after}"
    flag = word.partition("=")[0].replace("_", "-")
    known = ["--help", "--help-all"]
    for name, hint in flags_of(kind):
        head, dot, tail = name.rpartition(".")
        known += [f"--{name}", *([f"--{head}{dot}no-{tail}"] if hint is bool else [])]
    return f"unknown option {flag} of tpfuse {command}{nearest(flag, known)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the options)")


def parse_plainly(kind: type[T], arguments: Sequence[str], command: str) -> T:
    """Parse the flags of `doctor` or `verify` without tyro. Prints help and exits if asked to.

    Raise UserError with one line. An option is a switch, or a tuple of texts if that is its default. Its help is in the
    metadata of its field.
    """
    parser = _Parser(
        prog=f"tpfuse {command}", description=inspect.getdoc(kind), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    for item in fields(kind):  # type: ignore[arg-type]
        how: dict[str, Any] = {"action": "store_true"}
        if item.default == ():
            how = {"nargs": "+", "metavar": "NAME", "default": ()}
        parser.add_argument(f"--{item.name}", help=item.metadata["help"], **how)
    parsed, rest = parser.parse_known_args(arguments)
    if rest:
        raise UserError(unknown(kind, rest[0], arguments, command))
    return kind(**vars(parsed))
