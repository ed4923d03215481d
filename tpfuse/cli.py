"""The commands of `tpfuse`. Bad input gives one line on stderr and exit status 2, a damaged checkpoint gives status 3.

A command imports the modules that it needs when it runs: importing torch takes seconds, and neither help nor most
errors need it.
"""

import contextlib
import gc
import io
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tpfuse._version import __version__
from tpfuse.nearest import nearest
from tpfuse.train.errors import CheckpointError, CheckpointMismatch, PeerLost, RunError, UserError, of_disk
from tpfuse.train.messages import fail, is_first_rank, say, show_cursor

if TYPE_CHECKING:
    from tpfuse.train.launch import RankInfo
    from tpfuse.train.options import TrainCommand
    from tpfuse.train.setup import Run

T = TypeVar("T")
_PREPARATION = 1800.0  # seconds that the ranks of torchrun wait while the first one reads and encodes the text


def _train(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_train
    from tpfuse.train.corpus import STANDARD_LIBRARY

    options = parse_train(arguments)
    if is_first_rank():
        say(f"reading  {options.out if options.resume else options.data.path or STANDARD_LIBRARY}")
    from tpfuse.train.checkpoint import checkpoint_folders
    from tpfuse.train.launch import RankInfo, start_ranks, torchrun_rank
    from tpfuse.train.loop import train_rank
    from tpfuse.train.pipeline import rank_count
    from tpfuse.train.setup import prepare_run, with_layout

    info = torchrun_rank()
    if info is not None:
        return _train_under_torchrun(info, options)
    options = with_layout(options, None)
    run = prepare_run(options)
    world = rank_count(options.parallel)
    if world == 1:
        return train_rank(RankInfo(0, 1, 0, 1, None), run)
    try:
        return start_ranks(train_rank, world, run, timeout=options.comm.timeout)
    except KeyboardInterrupt:
        show_cursor()  # the first rank's progress bar has hidden it
        saved = checkpoint_folders(run.folder)
        newest = f"the newest checkpoint is {saved[0]}" if saved else f"nothing was saved in {run.folder}"
        raise RunError(f"ended at once by a second signal; {newest}") from None


def _train_under_torchrun(info: "RankInfo", options: "TrainCommand") -> int:
    """Train as a rank of torchrun. The first rank checks and prepares the run and tells the others the outcome."""
    import torch.distributed as dist

    from tpfuse.comm.collectives.collective import is_lost_peer, set_timeout
    from tpfuse.train.launch import device_of, join
    from tpfuse.train.loop import train_rank
    from tpfuse.train.setup import check_numbers, prepare_run, with_layout

    options = with_layout(options, info.world)
    check_numbers(options)
    outcome: list[Run | tuple[str, int]] = [("", 1)]
    join(info, device_of(info), options.comm.timeout)
    world = dist.group.WORLD
    assert world is not None
    set_timeout(world, _PREPARATION)
    if info.rank == 0:
        try:
            outcome = [prepare_run(options, info.local_world)]
        except (UserError, CheckpointMismatch, CheckpointError) as error:
            outcome = [(str(error), error.status)]
    try:
        dist.broadcast_object_list(outcome, src=0)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerLost(f"rank {info.rank} lost another rank while rank 0 prepared the run") from error
    if isinstance(outcome[0], tuple):
        dist.destroy_process_group()
        raise RunError(*outcome[0])
    set_timeout(world, options.comm.timeout)
    return train_rank(info, outcome[0])


def _subject_and_options(kind: type[T], arguments: Sequence[str], command: str, question: str) -> tuple[str, T]:
    """Return (the first argument, the options after it). Raises UserError(question) if the first is an option."""
    from tpfuse.train.config import parse_command

    if not arguments or arguments[0].startswith("-"):
        if "--help" in arguments or "-h" in arguments:
            parse_command(kind, ["--help"], command)
        raise UserError(question)
    return arguments[0], parse_command(kind, arguments[1:], command)


def _sample(arguments: Sequence[str]) -> int:
    from tpfuse.train.options import SampleCommand

    question = "expected the folder of a run or of a Hugging Face model: tpfuse sample FOLDER [options]"
    run, options = _subject_and_options(SampleCommand, arguments, "sample FOLDER", question)
    from tpfuse.train.sample import sample

    print(sample(Path(run), options))
    return 0


def _export(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import ExportCommand

    options = parse_command(ExportCommand, arguments, "export")
    from tpfuse.train.export import export

    print(export(options.run, options.folder))
    return 0


def _evaluate(arguments: Sequence[str]) -> int:
    from tpfuse.train.options import EvaluateCommand

    question = "expected the folder of a run or of a Hugging Face model: tpfuse evaluate FOLDER [options]"
    run, options = _subject_and_options(EvaluateCommand, arguments, "evaluate FOLDER", question)
    from tpfuse.train.evaluate import evaluate

    print(evaluate(Path(run), options.data, options.length))
    return 0


def _memory(arguments: Sequence[str]) -> int:
    from tpfuse.train.options import MemoryCommand

    question = "expected a preset, a TOML file or a Hugging Face folder: tpfuse memory MODEL [options]"
    source, options = _subject_and_options(MemoryCommand, arguments, "memory MODEL", question)
    from tpfuse.train.memory import memory

    print(memory(source, options))
    return 0


def _plan(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import PlanCommand

    options = parse_command(PlanCommand, arguments, "plan")
    gc.disable()  # a third of the search's time would pass in looking for garbage, of which it makes none
    try:
        from tpfuse.plan.command.run import plan

        print(plan(options))
    finally:
        gc.freeze()
        gc.enable()
    return 0


def _hang(arguments: Sequence[str]) -> int:
    from tpfuse.train.options import HangCommand

    run, _ = _subject_and_options(HangCommand, arguments, "hang RUN", "expected the folder of a run: tpfuse hang RUN")
    from tpfuse.train.hang import hang

    print(hang(Path(run)))
    return 0


def _watch(arguments: Sequence[str]) -> int:
    from tpfuse.train.options import WatchCommand

    question = "expected the folder of a run: tpfuse watch RUN [options]"
    run, options = _subject_and_options(WatchCommand, arguments, "watch RUN", question)
    from tpfuse.train.watch import watch

    watch(Path(run), options.port)
    return 0


def _profile(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import ProfileCommand, ProfileCompareCommand, ProfileSummaryCommand

    if arguments[:1] == ["compare"]:
        pair = parse_command(ProfileCompareCommand, arguments[1:], "profile compare")
        from tpfuse.profile.compare import compare

        text, slower = compare(pair.before, pair.after, pair.slower)
        print(text)
        return int(slower)
    if arguments[:1] == ["summary"]:
        traces = parse_command(ProfileSummaryCommand, arguments[1:], "profile summary")
        from tpfuse.profile.command import summary_of

        print(summary_of(traces.folder))
        return 0
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_command(ProfileCommand, arguments[:cut], "profile")
    from tpfuse.profile.command import profile

    return profile(options, arguments[cut + 1 :])


def _prepare(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_prepare

    options = parse_prepare(arguments)
    from tpfuse.train.setup import prepare_tokens

    file = prepare_tokens(options)
    print(f"{file.paths[0]}: {file.count} tokens of {file.source}, vocabulary {file.tokenizer.vocab_size}")
    return 0


def _tune(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import TuneCommand

    operators = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = parse_command(TuneCommand, arguments[len(operators) :], "tune [OPERATOR ...]")
    from tpfuse.tools import tune

    return tune.run(operators, options.out, options.minutes)


def _verify(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import VerifyCommand

    options = parse_command(VerifyCommand, arguments, "verify")
    from tpfuse.tools import verify

    return verify.run(options.operators, options.json, options.compile)


def _doctor(arguments: Sequence[str]) -> int:
    from tpfuse.train.config import parse_command
    from tpfuse.train.options import DoctorCommand

    options = parse_command(DoctorCommand, arguments, "doctor")
    try:
        from tpfuse.tools import doctor
    except ImportError as error:  # A package that is damaged or does not suit another one is a finding too.
        raise RunError(f"tpfuse cannot be imported, so every command will fail: {error}") from error
    return doctor.run(options.json)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train a GPT on text, on one rank or many"),
    "evaluate": (_evaluate, "measure the loss of a trained model on a whole text"),
    "sample": (_sample, "generate text with a trained model"),
    "export": (_export, "write a trained model for Hugging Face's transformers"),
    "memory": (_memory, "count the memory that each rank of a run will hold"),
    "plan": (_plan, "predict which layout trains a model fastest, before a GPU is paid for"),
    "profile": (_profile, "say where the time of each rank goes, and who waits for whom"),
    "watch": (_watch, "show the metrics of a run in a browser"),
    "hang": (_hang, "say which rank the others of a run waited for, from its flight records"),
    "prepare": (_prepare, "turn text into a token file"),
    "doctor": (_doctor, "find out what of this machine makes tpfuse fail or slow"),
    "verify": (_verify, "compare every kernel with its reference on this machine"),
    "tune": (_tune, "measure tile sizes of the kernels on this GPU"),
}


_OTHERS = (
    "tpfuse COMMAND --help lists the options of a command.",
    "tpfuse --version prints the version.",
    "tpfuse --completion bash (or zsh, fish) prints a script for tab completion.",
)
_SHELLS = ("bash", "zsh", "fish")


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: tpfuse COMMAND [options]", "", *lines, "", *_OTHERS])


def _version(arguments: Sequence[str]) -> int:
    print(f"tpfuse {__version__}")
    return 0


def _completion(arguments: Sequence[str]) -> int:
    """Print the script by which a shell completes commands and options."""
    shell = arguments[0] if arguments else ""
    if shell not in _SHELLS:
        raise UserError(f"{shell!r} is not a shell: expected one of {', '.join(_SHELLS)}")
    from tyro.extras import subcommand_cli_from_dict

    from tpfuse.train import options

    kinds = {name: getattr(options, f"{name.capitalize()}Command") for name in COMMANDS}
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        subcommand_cli_from_dict(kinds, prog="tpfuse", args=["--tyro-write-completion", shell, "-"])
    print(script.getvalue().replace("complete -F", "complete -o default -F"))  # so that RUN, a path, is completed
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name = arguments[0]
    functions = {name: function for name, (function, _) in COMMANDS.items()}
    functions |= {"--version": _version, "--completion": _completion}
    if name not in functions:
        fail(name, f"there is no such command{nearest(name, list(COMMANDS))} (one of {', '.join(COMMANDS)})")
        return 2
    try:
        return functions[name](arguments[1:])
    except (UserError, CheckpointMismatch, CheckpointError, RunError) as error:
        fail(name, str(error), error.missing if isinstance(error, PeerLost) else ())
        return error.status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        fail(name, of_disk(error))
        return 1
