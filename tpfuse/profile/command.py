"""`tpfuse profile`: runs a command under a profiler, and explains what the profiler has recorded."""

import itertools
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

from tpfuse.comm.host import replace_file
from tpfuse.profile.compare import SUMMARY
from tpfuse.profile.perfetto import write_perfetto
from tpfuse.profile.summary import summarise, table
from tpfuse.profile.trace_files import read_traces
from tpfuse.train.config import PRESETS
from tpfuse.train.errors import RunError, UserError
from tpfuse.train.messages import program, say
from tpfuse.train.options import ProfileCommand
from tpfuse.train.step_numbers import profiled_steps

TRACE, RUN = "trace", "run"  # folders within a profile


def profile(options: ProfileCommand, words: Sequence[str]) -> int:
    """Runs the command `words`, or the training of a configuration, and prints what was found.

    Returns the exit status of the command. Raises UserError.
    """
    profiled_steps(options.steps)
    out = options.out or Path("profiles") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: expected a new or an empty folder")
    commands = commands_of(options, words, out)
    if options.print:
        for command in commands:
            say(shlex.join(command))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for command in commands:
        say(f"running  {shlex.join(command)}")
        status = _run(command)
        if status:
            raise RunError(f"the command ended with exit status {status}; what was recorded is in {out}", status)
    for checkpoint in (out / RUN).glob("step-*"):  # nobody continues a run that was only profiled
        shutil.rmtree(checkpoint)
    say()
    say(summary_of(out))
    return 0


def commands_of(options: ProfileCommand, words: Sequence[str], out: Path) -> list[list[str]]:
    """Returns the commands to run, in their order. Raises UserError if this machine or the command does not permit."""
    command = _command(words)
    flags = ["--profile.steps", options.steps]
    flags += ["--profile.trace", str(out / TRACE)]
    return [_trained(command, options, [*flags], out)]


def _command(words: Sequence[str]) -> list[str]:
    """Returns the program that the user means, with its arguments."""
    if not words:
        raise UserError("expected a configuration or a command after --, as in: tpfuse profile -- tiny --parallel.tp 2")
    first, *rest = words
    tpfuse = [sys.executable, "-m", "tpfuse"]
    if first in PRESETS:
        return [*tpfuse, "train", "--model.preset", first, *rest]
    if first.endswith(".toml"):
        if not Path(first).is_file():
            raise UserError(f"there is no file {first}")
        return [*tpfuse, "train", "--config", first, *rest]
    if first == "tpfuse":
        return [*tpfuse, *rest]
    found = shutil.which(first) or shutil.which(first, path=str(Path(sys.executable).parent))  # of this environment
    if found is None:
        raise UserError(f"{first} is neither a preset ({', '.join(PRESETS)}), a TOML file nor a program")
    return [found, *rest]


def _trained(command: list[str], options: ProfileCommand, flags: Sequence[str], out: Path) -> list[str]:
    """Returns a command that runs `tpfuse train`, with the flags that record the steps and end after them."""
    words = [Path(word).name for word in command]
    if not any(pair == ("tpfuse", "train") for pair in itertools.pairwise(words)):
        raise UserError(
            f"--with {options.with_} records the steps of `tpfuse train`, and this command is another program: in that"
            " program, use tpfuse.record_trace(FOLDER, model, group), and then: tpfuse profile summary FOLDER"
        )
    if "--resume" in command:
        raise UserError("a profile is a run of its own: leave out --resume, or give `tpfuse train` --profile.trace")
    last = profiled_steps(options.steps)[-1]
    return [*command, *flags, "--train.steps", str(last), "--train.eval-every", "0", "--out", str(out / RUN)]


def _run(command: Sequence[str]) -> int:
    """Runs a command, which gets Ctrl-C and SIGTERM too, and returns its exit status."""
    process = subprocess.Popen(command)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def summary_of(folder: Path) -> str:
    """Writes the explanation of a profile's traces beside them, and returns it as text. Raises UserError.

    folder: one that `tpfuse profile` has written, or one that has the files of `tpfuse.record_trace`.
    """
    traces = read_traces(folder / TRACE if (folder / TRACE).is_dir() else folder)
    document = summarise(traces)
    replace_file(folder / SUMMARY, json.dumps(document, indent=1))
    write_perfetto(traces, folder / "trace.json")
    files = [SUMMARY, "trace.json (for ui.perfetto.dev)"]
    again = f"compare with another profile: {program()} profile compare {folder} OTHER"
    return "\n".join([table(document), "", *document["sentences"], "", f"files in {folder}: {', '.join(files)}", again])
