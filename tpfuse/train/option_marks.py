"""The marks on the options of `tpfuse train`, read as one table: options that mean nothing without others."""

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

from tpfuse.errors import UserError
from tpfuse.train.options import Effect, Needs, TrainCommand

Place = tuple[str, ...]  # of an option in the document of `tpfuse.train.config.resolved`


@cache
def marks(kind: type = TrainCommand) -> dict[Place, tuple[Any, ...]]:
    """Return the marks of each option, by its place."""
    found: dict[Place, tuple[Any, ...]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and is_dataclass(hint):
            found |= {(name, *place): own for place, own in marks(hint).items()}
        else:
            found[(name.rstrip("_"),)] = getattr(hint, "__metadata__", ())
    return found


@cache
def needs() -> dict[Place, Needs]:
    """Return what options need to mean something, by their places. All others mean something in every run."""
    return {place: mark for place, own in marks().items() for mark in own if isinstance(mark, Needs)}


def value_of(options: Any, place: Place) -> Any:
    """Return the value of an option; None for one that is not set, as TOML may say it."""
    for name in place:
        options = getattr(options, name)
    return None if options == "" else options


def meaningless(options: TrainCommand) -> list[Place]:
    """Return the options that have not their default, and mean nothing beside the others."""
    usual = TrainCommand()
    return [
        place
        for place, need in needs().items()
        if value_of(options, place) != value_of(usual, place) and not need.met(options)
    ]


def without(options: TrainCommand, places: Collection[Place]) -> TrainCommand:
    """Return `options` with the defaults of some."""
    for section, name in places:
        own = getattr(options, section)
        usual = next(item.default for item in fields(own) if item.name == name)
        options = replace(options, **{section: replace(own, **{name: usual})})
    return options


def suited(options: TrainCommand) -> TrainCommand:
    """Return the options of a changed layout. Those that mean nothing in it are reset if they affect only rounding."""
    return without(
        options, [place for place in meaningless(options) if {Effect.ROUNDING, Effect.ORDER} & set(marks()[place])]
    )


def described(options: TrainCommand, places: Collection[Place]) -> str:
    """Return options as flags, and what they need; "" for none."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(needs()[place].said, []).append(_flag(place, value_of(options, place)))
    return "; ".join(f"{', '.join(flags)}: only for {said}" for said, flags in groups.items())


def _flag(place: Place, value: object) -> str:
    name = f"--{'.'.join(place).replace('_', '-')}"
    return name if value is True else f"{name} {value}"


def check_needs(options: TrainCommand) -> None:
    """Raise UserError for options that mean nothing beside the others."""
    if found := described(options, meaningless(options)):
        raise UserError(found)
