"""The commands of `tpfuse`. Bad input gives one line on stderr and exit status 2, a damaged checkpoint gives status 3.

A command imports the modules that it needs when it runs: importing torch takes seconds, and neither help nor most
errors need it.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpfuse._version import __version__
from tpfuse.errors import CheckpointError, PeerLost, RunError, UserError, check_extra, of_disk
from tpfuse.nearest import nearest
from tpfuse.train.child import quick_imports
from tpfuse.train.flags import HELP, parse_plainly
from tpfuse.train.launchers import launched, several
from tpfuse.train.messages import accept_all_texts, discard_output, fail, is_first_rank, say, show_cursor, warn

if TYPE_CHECKING:
    from tpfuse.train.launch import RankInfo
    from tpfuse.train.options import PlanCommand, TrainCommand

_PREPARATION = 1800.0  # seconds that the ranks of a launcher wait while the first one reads and encodes the text


def _train(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_train
    from tpfuse.train.corpus import STANDARD_LIBRARY

    options = parse_train(arguments)
    if is_first_rank():
        say(f"reading  {options.out if options.resume == 'yes' else options.data.path or STANDARD_LIBRARY}")
    with quick_imports():
        from tpfuse.checkpoint.checkpoint import checkpoint_folders
        from tpfuse.train.check_options import with_layout
        from tpfuse.train.launch import RankInfo, launched_rank, start_ranks
        from tpfuse.train.loop import train_rank
        from tpfuse.train.pipeline_options import rank_count
        from tpfuse.train.setup import prepare_run

    info = launched_rank()
    if info is not None:
        return _train_as_rank(info, options)
    options = with_layout(options, None)
    run = prepare_run(options)
    world = rank_count(options.parallel)
    if world == 1 and not options.restarts:
        return train_rank(RankInfo(0, 1, 0, 1, None), run)
    restarts = 0
    while True:
        try:
            return start_ranks(train_rank, world, run, timeout=options.comm.timeout)
        except PeerLost as error:
            show_cursor()  # the first rank's progress bar has hidden it
            if restarts == options.restarts:
                used = f"; all restarts are used (--restarts {restarts})" if restarts else ""
                raise PeerLost(f"{error}{used}", error.missing) from error
            restarts += 1
            warn(f"{error}; restart {restarts} of {options.restarts}")
            run = prepare_run(replace(run.options, out=run.folder, resume="yes"))
        except KeyboardInterrupt:
            show_cursor()
            saved = checkpoint_folders(run.folder)
            newest = f"the newest checkpoint is {saved[0]}" if saved else f"nothing was saved in {run.folder}"
            raise RunError(f"ended at once by a second signal; {newest}") from None


def _train_as_rank(info: "RankInfo", options: "TrainCommand") -> int:
    """Train as a rank of a launcher. The first rank checks and prepares the run and tells the others the outcome."""
    import torch.distributed as dist

    from tpfuse.comm.collectives.collective import set_timeout
    from tpfuse.comm.errors import PeerTimeout, RankFailed
    from tpfuse.train.check_options import check_options, with_layout
    from tpfuse.train.launch import by_first, device_of, join
    from tpfuse.train.loop import train_rank
    from tpfuse.train.setup import prepare_run

    if options.restarts:
        raise UserError(f"--restarts {options.restarts}: not tpfuse starts these ranks: give torchrun --max-restarts")
    options = with_layout(options, info.world)
    check_options(options)
    join(info, device_of(info), options.comm.timeout)
    world = dist.group.WORLD
    assert world is not None
    set_timeout(world, _PREPARATION)
    try:
        run = by_first(world, lambda: prepare_run(options, info.local_world), "preparing the run")
    except RunError:
        dist.destroy_process_group()
        raise
    except (PeerTimeout, RankFailed) as error:
        raise PeerLost(f"rank {info.rank} lost another rank while rank 0 prepared the run") from error
    set_timeout(world, options.comm.timeout)
    return train_rank(info, run)


def _plan(options: "PlanCommand") -> str:
    gc.disable()  # a third of the search's time would pass in looking for garbage, of which it makes none
    try:
        from tpfuse.commands.plan.run import plan

        return plan(options)
    finally:
        gc.freeze()
        gc.enable()


def _profile(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import ProfileCommand, ProfileSummaryCommand

    if arguments[:1] == ["summary"]:
        traces = parse_command(ProfileSummaryCommand, arguments[1:], "profile summary")
        from tpfuse.commands.profile import summary_of

        print(summary_of(traces.folder))
        return 0
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_command(ProfileCommand, arguments[:cut], "profile")
    from tpfuse.commands.profile import profile

    return profile(options, arguments[cut + 1 :])


def _doctor(json: bool) -> int:
    try:
        from tpfuse.tools import doctor
    except ImportError as error:  # A package that is damaged or does not suit another one is a finding too.
        raise RunError(f"tpfuse cannot be imported, so every command will fail: {error}") from error
    return doctor.run(json)


@dataclass(frozen=True)
class Subcommand:
    """A command, whose options are the class NAMECommand in `tpfuse.train.options`."""

    text: str
    # The function that runs the command, as MODULE:NAME. It returns what is to be printed, or an exit status.
    function: str
    # The first argument, if it is no option.
    subject: str = ""
    # What the error expects if the subject is missing.
    expected: str = ""
    # Whether the function takes the values of the options one by one instead of the object that holds them.
    unpacked: bool = False
    # Whether the function parses the arguments itself.
    parses: bool = False
    # Whether the command needs the library alone.
    alone: bool = False
    # What the processes of a launcher do: they are the command's ranks, each runs it, or they are refused.
    processes: Literal["ranks", "each", "refused"] = "refused"


_MODEL = "the folder of a run or of a Hugging Face model"
COMMANDS = {
    "train": Subcommand(
        "train a GPT on text, on one rank or many", "tpfuse.cli:_train", parses=True, processes="ranks"
    ),
    "evaluate": Subcommand(
        "measure the loss of a trained model on a whole text", "tpfuse.commands.evaluate:evaluate", "FOLDER", _MODEL,
        processes="ranks",
    ),
    "sample": Subcommand(
        "generate text with a trained model", "tpfuse.commands.sample:sample", "FOLDER", _MODEL, processes="ranks"
    ),
    "export": Subcommand(
        "write a trained model for Hugging Face's transformers", "tpfuse.commands.export:export", unpacked=True
    ),
    "memory": Subcommand(
        "count the memory that each rank of a run will hold", "tpfuse.train.memory:memory", "MODEL",
        "a preset, a TOML file or a Hugging Face folder", processes="each",
    ),
    "plan": Subcommand("predict which layout trains a model fastest, before a GPU is paid for", "tpfuse.cli:_plan"),
    "profile": Subcommand(
        "say where the time of each rank goes, and who waits for whom", "tpfuse.cli:_profile", parses=True
    ),
    "watch": Subcommand(
        "show the metrics of a run in a browser", "tpfuse.commands.watch:watch", "RUN", "the folder of a run",
        unpacked=True, processes="each",
    ),
    "hang": Subcommand(
        "say which rank the others of a run waited for, from its flight records", "tpfuse.commands.hang:hang", "RUN",
        "the folder of a run", unpacked=True, processes="each",
    ),
    "prepare": Subcommand("turn text into a token file", "tpfuse.commands.prepare:prepare"),
    "doctor": Subcommand(
        "find out what of this machine makes tpfuse fail or slow", "tpfuse.cli:_doctor", unpacked=True, alone=True,
        processes="each",
    ),
    "verify": Subcommand(
        "compare every kernel with its reference on this machine", "tpfuse.tools.verify:run", unpacked=True, alone=True
    ),
    "tune": Subcommand("measure tile sizes of the kernels on this GPU", "tpfuse.tools.tune:run", unpacked=True),
}  # fmt: skip


def _parsed(name: str, kind: type, arguments: Sequence[str], title: str) -> Any:
    if COMMANDS[name].alone:
        return parse_plainly(kind, arguments, title)
    from tpfuse.train import config

    return config.parse_prepare(arguments) if name == "prepare" else config.parse_command(kind, arguments, title)


def _check_processes(command: Subcommand, arguments: Sequence[str]) -> None:
    """Raise UserError if a launcher has started several processes that the command cannot have."""
    found = several()
    if not found or command.processes == "each" or HELP & set(arguments):
        return
    if command.processes == "refused":
        raise UserError(f"one process is enough, and {found}")
    launched()


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in ("", "-h", "--help"):
        print(_usage())
        return 0 if name else 2
    if name == "--version":
        print(f"tpfuse {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"there is no such command{nearest(name, list(COMMANDS))} (one of {', '.join(COMMANDS)})")
    command = COMMANDS[name]
    _check_processes(command, arguments)
    if not command.alone:
        check_extra()
    module, _, attribute = command.function.partition(":")
    if command.parses:
        status: int = globals()[attribute](arguments)
        return status
    from tpfuse.train import options

    kind = getattr(options, f"{name.capitalize()}Command")
    title = f"{name} {command.subject}".rstrip()
    values: list[Any] = []
    if command.subject and not HELP & set(arguments):
        if not arguments or arguments[0].startswith("-"):
            more = " [options]" * bool(fields(kind))
            raise UserError(f"expected {command.expected}: tpfuse {title}{more}")
        values = [arguments[0] if command.subject == "MODEL" else Path(arguments[0])]
        arguments = arguments[1:]
    parsed = _parsed(name, kind, arguments, title)
    values += [getattr(parsed, item.name) for item in fields(kind)] if command.unpacked else [parsed]
    with quick_imports():
        function = getattr(import_module(module), attribute)
    result = function(*values)
    if isinstance(result, str):
        print(result)
    return result if isinstance(result, int) else 0


_OTHERS = (
    "tpfuse COMMAND --help lists the options of a command.",
    "tpfuse --version prints the version.",
)


def _usage() -> str:
    lines = [f"  {name:<10}{command.text}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: tpfuse COMMAND [options]", "", *lines, "", *_OTHERS])


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    accept_all_texts()
    name = arguments[0] if arguments else ""
    try:
        status = _run(name, arguments[1:])
        sys.stdout.flush()
        return status
    except (UserError, CheckpointError, RunError) as error:
        missing = error.missing if isinstance(error, PeerLost) else ()
        fail(name, str(error), missing, isinstance(error, RunError) and error.alone)
        return error.status
    except BrokenPipeError:
        discard_output()
        return 1
    except OSError as error:
        fail(name, of_disk(error))
        try:
            sys.stdout.flush()
        except OSError:  # it would be tried again at the end of Python
            discard_output()
        return 1
