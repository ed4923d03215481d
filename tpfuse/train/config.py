"""Read options from command lines and TOML files.

The sources override each other in this order, lowest first: defaults, the model's preset, the values that --init-from
determines, the run's config.toml (with --resume), --config FILE, flags. A preset that the user names overrides the
shape of the model of --init-from: the two are compared later, and a contradiction is an error. An unknown flag or key
is an error, which names the nearest known one.
"""

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

import tpfuse.models
from tpfuse.checkpoint import untrusted
from tpfuse.checkpoint.untrusted import quoted, reading
from tpfuse.errors import UserError
from tpfuse.nearest import nearest
from tpfuse.train.flags import HELP, check_paths, flags_of, key_of, unknown
from tpfuse.train.option_marks import meaningless, without
from tpfuse.train.options import FIRST, ModelOptions, PrepareCommand, Preset, TrainCommand
from tpfuse.train.schedule import lowest

T = TypeVar("T")
PRESETS: tuple[str, ...] = get_args(Preset)
_SHAPE = tuple(item.name for item in fields(ModelOptions) if item.name not in ("from_", "n_positions"))


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of `flag` in a command line that is not parsed yet; None if the flag is absent."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(flag + "="):
            value = argument.partition("=")[2]
    return value


def parse_command(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Parse flags, which override `default`. Raise UserError with one line. Prints help and exits if asked to."""
    if HELP & set(arguments):
        _print_help(kind, default, command, everything="--help-all" in arguments)
    if homes := [word for word in arguments if re.match(r"--[\w.-]+=~(/|$)", word)]:
        raise UserError(f"{homes[0]}: shells leave ~ as it is here: write {homes[0].replace('=', ' ', 1)}")
    check_paths(kind, arguments)
    printed = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(printed):
            words = list(arguments)
            parsed, rest = tyro.cli(kind, args=words, prog=f"tpfuse {command}", return_unknown_args=True, **options)
    except SystemExit:
        raise UserError(f"{_one_line(printed.getvalue())} (tpfuse {command} --help lists the options)") from None
    if rest:
        raise UserError(unknown(kind, rest[0], arguments, command))
    result: T = parsed
    return result


def _print_help(kind: type, default: object, command: str, everything: bool) -> NoReturn:
    """Print the help of a command: the options in `FIRST`, or all."""
    names = None if everything else FIRST.get(kind)
    with contextlib.suppress(SystemExit):
        tyro.cli(_shown(kind, default, names), args=["--help"], prog=f"tpfuse {command}")
    if names is not None:
        print(f"tpfuse {command} --help-all lists all {len(list(flags_of(kind)))} options.")
    sys.exit(0)


def _shown(kind: type, default: object, names: Collection[str] | None, prefix: str = "") -> type:
    """Return a class for tyro's help, with the options in `names` alone, or all for None.

    Each option has its docstring as one line, since tyro would keep the line breaks of the source.
    """
    texts = {entry.arg_name: entry.description or "" for entry in docstring_parser.parse_from_object(kind).params}
    hints, shown = get_type_hints(kind, include_extras=True), []
    for item in fields(kind):
        hint, name = hints[item.name], prefix + key_of(item.name).replace("_", "-")
        if is_dataclass(hint):
            part = _shown(hint, getattr(default, item.name, None), names, f"{name}.")  # type: ignore[arg-type]
            if fields(part):
                shown.append((item.name, part, field(default_factory=part)))
        elif names is None or name in names:
            value = getattr(default, item.name, item.default)
            help_text = {"help": " ".join(texts[item.name].split())}
            shown.append((item.name, hint, field(default=value, metadata=help_text)))
    return make_dataclass(kind.__name__, shown, namespace={"__doc__": kind.__doc__}, kw_only=True)


def _one_line(message: str) -> str:
    """Return tyro's error box as one line, without its title and the option's help."""
    lines = [line.strip("│╭╮╰╯─ ") for line in message.splitlines()]
    body = itertools.takewhile(lambda line: not line.startswith("Argument helptext"), (x for x in lines[1:] if x))
    text = " ".join(line for line in body if not line.startswith("For full helptext"))
    text = re.sub(r"no type matching .* Got errors: .*- <class '\w+'>: ", "", text)  # None is not the value meant
    return text or "the options cannot be read"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise UserError if the file cannot be read."""
    with reading(path):
        return untrusted.read_toml(path)


def _converted(value: Any, hint: Any, where: str) -> Any:
    """Convert a TOML value to the type of its option. Raise UserError if the value is of another type."""
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise UserError(f"{where} = {quoted(value)}: expected one of {', '.join(map(str, get_args(hint)))}")
    kinds = tuple(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
    if Path in kinds:
        if isinstance(value, str) and value:
            return Path(value).expanduser()
        raise UserError(f"{where} = {quoted(value)}: expected a path in quotes")
    if kinds == (float,) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool)):
        raise UserError(f"{where} = {quoted(value)}: expected {' | '.join(kind.__name__ for kind in kinds)}")
    return value


def overlaid(options: T, table: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """Return `options` with the values of a TOML table. Raise UserError for unknown keys and wrong types."""
    hints = get_type_hints(type(options))
    names = {key_of(item.name): item.name for item in fields(options)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        where = f"{source}: {prefix}{key}"
        if name not in names or (not prefix and name in ("config", "resume", "restarts")):
            raise UserError(f"{where} is not known{nearest(name, list(names))}")
        name = names[name]
        current = getattr(options, name)
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise UserError(f"{where} = {quoted(value)}: expected a table")
            changes[name] = overlaid(current, value, source, f"{prefix}{key}.")
        else:
            changes[name] = _converted(value, hints[name], where)
    return replace(options, **changes)  # type: ignore[type-var]


def load_preset(name: str) -> dict[str, Any]:
    """Return the tables of a preset. Raise UserError for a name that is not in `PRESETS`."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} is not known: expected one of {', '.join(PRESETS)}")
    folder = Path(next(iter(tpfuse.models.__path__)))
    return read_toml(folder / f"{name}.toml")


def parse_train(arguments: Sequence[str]) -> TrainCommand:
    """Return the options of `tpfuse train`. Raise UserError."""
    arguments = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in arguments]
    for name in ("--resume", "--train.cuda-graph"):
        arguments = _with_value(arguments, name, "yes")
    run = _resumed_run(arguments)
    config = flag_value(arguments, "--config")
    files = [] if config is None else [(config, read_toml(Path(config)))]

    def changed(options: TrainCommand) -> TrainCommand:
        for file, table in files:
            options = overlaid(options, table, file)
        return parse_command(TrainCommand, arguments, "train", options)

    before = _of_model(arguments, [*run, *files], resumes=bool(run))
    for file, table in run:
        before = overlaid(before, table, file)
    begun = _with_end(before) if run else before
    options = changed(begun)
    if run and (lost := meaningless(options)):
        options = changed(without(begun, lost))  # what is given again is refused as in a new run
    end = options.optim.decay_steps
    if run and before.optim.decay_steps is None and end == before.train.steps == options.train.steps:
        end = None  # the run's config.toml does not change, so that another run from it may have another length
    # The run's config.toml has the number, so that a resumed run keeps it.
    options = replace(options, optim=replace(options.optim, min_lr=lowest(options.optim), decay_steps=end))
    return replace(options, resume="yes") if run else options


def _resumed_run(arguments: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (path, tables) of the config.toml of the run that is continued; [] for a new run. Raise UserError."""
    out, resume = flag_value(arguments, "--out"), flag_value(arguments, "--resume")
    if resume in ("yes", "auto") and out is None:
        raise UserError("--resume needs --out RUN, the folder of the run to continue")
    saved = Path(out or "") / "config.toml"
    if resume != "yes" and not (resume == "auto" and saved.is_file()):
        return []
    if not saved.is_file():
        raise UserError(f"there is no run to resume in {out}: {saved} is missing")
    table = read_toml(saved)
    if not table:
        raise UserError(
            f"{saved} is empty: write the run's options into it; manifest.json of each checkpoint has them too"
        )
    return [(str(saved), table)]


def _of_model(
    arguments: Sequence[str], sources: Sequence[tuple[str, dict[str, Any]]], *, resumes: bool
) -> TrainCommand:
    """Return the defaults, with those of the model that the flags or else the files name. Raise UserError."""
    preset, weights = flag_value(arguments, "--model.preset"), flag_value(arguments, "--init-from")
    decoder = flag_value(arguments, "--model.from")
    for _, table in reversed(sources):
        model = table.get("model")
        if isinstance(model, dict):
            preset = preset or (str(model["preset"]) if "preset" in model else None)
            decoder = decoder or model.get("from")
        weights = weights or table.get("init_from", table.get("init-from"))
    source, inherited = f"--init-from {weights}", {}
    if isinstance(decoder, str):
        _check_alone(decoder, arguments, sources)
        source = f"--model.from {decoder}"
    folder = decoder or weights
    if isinstance(folder, str) and not resumes:  # a run's config.toml has these values too
        from tpfuse.train.initial_weights import decoder_options, inherited_options  # this imports torch

        inherited = (decoder_options if decoder else inherited_options)(Path(folder))
    options = TrainCommand()
    if preset is not None:
        options = overlaid(options, inherited, source)
        inherited.pop("model", None)
    preset = preset or options.model.preset
    # For another preset the parser, or the TOML check, raises the error.
    if preset in PRESETS and not isinstance(decoder, str) and not resumes:
        options = overlaid(options, load_preset(preset), f"preset {preset}")
        options = replace(options, model=replace(options.model, preset=preset))  # type: ignore[arg-type]
    return overlaid(options, inherited, source)


def _with_value(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """Return the command line with `value` after `flag` where the flag stands alone."""
    words: list[str] = []
    for word, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        words += [word, value] if word == flag and following.startswith("-") else [word]
    return words


def _with_end(options: TrainCommand) -> TrainCommand:
    """Return the options with the step at which the learning rate's schedule ends, which more steps do not move."""
    optim, steps = options.optim, options.train.steps
    ends = bool(optim.decay_steps) or optim.schedule == "constant"
    return options if ends else replace(options, optim=replace(optim, decay_steps=steps))


def _check_alone(decoder: str, arguments: Sequence[str], sources: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raise UserError if an option stands beside --model.from that config.json of the folder determines."""
    given = [name for name in _SHAPE if flag_value(arguments, f"--model.{name.replace('_', '-')}") is not None]
    given += ["no-bias"] if "--model.no-bias" in arguments else []
    flags = [f"--model.{name.replace('_', '-')}" for name in given]
    for file, table in sources:
        model = table.get("model")
        keys = {key.replace("-", "_") for key in model} if isinstance(model, dict) else set()
        flags += [f"{file}: model.{name}" for name in _SHAPE if name in keys]
        flags += [f"{file}: init_from"] if {"init_from", "init-from"} & set(table) else []
    if flag_value(arguments, "--init-from") is not None:
        flags.append("--init-from")
    if flags:
        raise UserError(f"--model.from {decoder} names the whole model and its weights: leave out {', '.join(flags)}")


def profiled_steps(text: str) -> range:
    """Return the steps that --profile.steps names: one number, or the first and the last. Raise UserError."""
    found = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text)
    if found is not None and 1 <= int(found[1]) <= int(found[2] or found[1]):
        return range(int(found[1]), int(found[2] or found[1]) + 1)
    raise UserError(f"steps {text!r}: expected a step, such as 10, or the first and the last, such as 10:12")


def parse_prepare(arguments: Sequence[str]) -> PrepareCommand:
    """Return the options of `tpfuse prepare`. Raise UserError."""
    file = flag_value(arguments, "--config")
    out = flag_value(arguments, "--out")
    if out is None and not HELP & set(arguments):
        raise UserError("--out FOLDER is needed: tokens.bin and tokens.json are written there")
    if file is None or out is None:
        return parse_command(PrepareCommand, arguments, "prepare")
    options = overlaid(PrepareCommand(Path(out)), read_toml(Path(file)), file)
    return parse_command(PrepareCommand, arguments, "prepare", options)


def resolved(options: TrainCommand) -> dict[str, Any]:
    """Return the options as a TOML document that gives the same run again.

    What belongs to one start of the run is left out: its folder, and what is profiled.
    """
    document = asdict(options)
    for name in ("out", "resume", "restarts", "config", "profile"):
        del document[name]
    if options.model.from_ is not None:
        document["model"] = {"from_": options.model.from_, "n_positions": options.model.n_positions}
    return _written(document)


def _written(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table that TOML can hold: paths become strings, and values that are not set are left out."""
    given = {key_of(key): value for key, value in table.items() if value is not None}
    tables = {key: _written(value) for key, value in given.items() if isinstance(value, dict)}
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()} | tables
