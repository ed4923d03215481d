"""The commands of `tpfuse`. Bad input: one line on stderr, exit status 2; a damaged checkpoint: 3."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from tpfuse.comm.process_group import is_lost_peer, set_timeout
from tpfuse.profile import tune, verify
from tpfuse.train.checkpoint import CheckpointError, CheckpointMismatch, checkpoint_folders
from tpfuse.train.config import parse_command, parse_prepare, parse_train
from tpfuse.train.errors import PeerLost, RunError, UserError, of_disk
from tpfuse.train.launch import Place, device_of, join, start_ranks, torchrun_place
from tpfuse.train.memory import memory
from tpfuse.train.messages import fail, show_cursor
from tpfuse.train.options import MemoryCommand, SampleCommand, TrainCommand, TuneCommand, VerifyCommand
from tpfuse.train.rank import train_rank
from tpfuse.train.sample import sample
from tpfuse.train.setup import Run, check_numbers, prepare_run, prepare_tokens, with_layout

_PREPARATION = 1800.0  # seconds that the ranks of torchrun wait while the first one reads and encodes the text


def _train(arguments: Sequence[str]) -> int:
    options = parse_train(arguments)
    place = torchrun_place()
    if place is not None:
        return _train_under_torchrun(place, options)
    options = with_layout(options, None)
    run = prepare_run(options)
    world = options.parallel.tp * options.parallel.cp * options.parallel.dp
    if world == 1:
        return train_rank(Place(0, 1, 0, 1, None), run)
    try:
        return start_ranks(train_rank, world, run, timeout=options.comm.timeout)
    except KeyboardInterrupt:
        show_cursor()  # which the first rank's progress bar has hidden
        saved = checkpoint_folders(run.folder)
        newest = f"the newest checkpoint is {saved[0]}" if saved else f"nothing was saved in {run.folder}"
        raise RunError(f"ended at once by a second signal; {newest}") from None


def _train_under_torchrun(place: Place, options: TrainCommand) -> int:
    """The first rank checks and prepares; the others hear whether to go on."""
    options = with_layout(options, place.world)
    check_numbers(options)
    outcome: list[Run | tuple[str, int]] = [("", 1)]
    join(place, device_of(place), options.comm.timeout)
    world = dist.group.WORLD
    assert world is not None
    set_timeout(world, _PREPARATION)
    if place.rank == 0:
        try:
            outcome = [prepare_run(options, place.local_world)]
        except (UserError, CheckpointMismatch) as error:
            outcome = [(str(error), 2)]
        except CheckpointError as error:
            outcome = [(str(error), 3)]
    try:
        dist.broadcast_object_list(outcome, src=0)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerLost(f"rank {place.rank} lost another rank while rank 0 prepared the run") from error
    if isinstance(outcome[0], tuple):
        message, status = outcome[0]
        if place.rank == 0:
            fail("train", message)
        dist.destroy_process_group()
        return status
    set_timeout(world, options.comm.timeout)
    return train_rank(place, outcome[0])


def _sample(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        if "--help" in arguments or "-h" in arguments:
            parse_command(SampleCommand, ["--help"], "sample RUN")
        raise UserError("which run? tpfuse sample RUN [options]")
    print(sample(Path(arguments[0]), parse_command(SampleCommand, arguments[1:], "sample RUN")))
    return 0


def _memory(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        if "--help" in arguments or "-h" in arguments:
            parse_command(MemoryCommand, ["--help"], "memory CONFIG")
        raise UserError("of which run? tpfuse memory PRESET|FILE.toml [options]")
    print(memory(arguments[0], parse_command(MemoryCommand, arguments[1:], "memory CONFIG")))
    return 0


def _prepare(arguments: Sequence[str]) -> int:
    file = prepare_tokens(parse_prepare(arguments))
    print(f"{file.path}: {len(file.tokens)} tokens of {file.source}, vocabulary {file.tokenizer.vocab_size}")
    return 0


def _tune(arguments: Sequence[str]) -> int:
    operators = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = parse_command(TuneCommand, arguments[len(operators) :], "tune [OPERATOR ...]")
    return tune.run(operators, options.out, options.minutes)


def _verify(arguments: Sequence[str]) -> int:
    options = parse_command(VerifyCommand, arguments, "verify")
    return verify.run(options.operators, options.json, options.compile)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train a GPT on text, on one rank or many"),
    "sample": (_sample, "generate text with a trained model"),
    "memory": (_memory, "count what each rank of a run will hold, by ZeRO's stage"),
    "prepare": (_prepare, "turn text into a token file"),
    "verify": (_verify, "compare every kernel with its reference on this machine"),
    "tune": (_tune, "measure tile sizes of the kernels on this GPU"),
}


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: tpfuse COMMAND [options]", "", *lines, "", "tpfuse COMMAND --help lists the options."])


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        fail(name, f"there is no such command: expected one of {', '.join(COMMANDS)}")
        return 2
    try:
        return COMMANDS[name][0](arguments[1:])
    except (UserError, CheckpointMismatch) as error:
        fail(name, str(error))
        return 2
    except CheckpointError as error:
        fail(name, str(error))
        return 3
    except RunError as error:
        fail(name, str(error), error.missing if isinstance(error, PeerLost) else ())
        return error.status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        fail(name, of_disk(error))
        return 1
