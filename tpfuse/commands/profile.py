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
from tpfuse.errors import RunError, UserError
from tpfuse.profile import ncu, nsys
from tpfuse.profile.perfetto import write_perfetto
from tpfuse.profile.summary import summarise, table
from tpfuse.profile.trace_files import read_traces
from tpfuse.train.config import PRESETS, profiled_steps
from tpfuse.train.options import ProfileCommand

TRACE, RUN = "trace", "run"  # folders within a profile
SUMMARY = "summary.json"


def profile(options: ProfileCommand, words: Sequence[str]) -> int:
    """Run the command `words`, or the training of a configuration, and print what was found.

    Return 0. Raise UserError for bad input and for what this machine lacks, and RunError if the command fails.
    """
    out = options.out or Path("profiles") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: expected a new or an empty folder")
    commands = commands_of(options, words, out, options.with_)
    if options.print:
        for command in commands:
            print(shlex.join(command))
        return 0
    tool = _tool(options)
    commands = commands_of(options, words, out, tool)
    out.mkdir(parents=True, exist_ok=True)
    for command in commands:
        print(f"running  {shlex.join(command)}", flush=True)
        status = _run(command)
        if status:
            raise RunError(f"the command ended with exit status {status}; what was recorded is in {out}", status)
    for checkpoint in (out / RUN).glob("step-*"):  # nobody continues a run that was only profiled
        shutil.rmtree(checkpoint)
    print()
    print(_result(options, out, tool))
    return 0


def commands_of(options: ProfileCommand, words: Sequence[str], out: Path, tool: str) -> list[list[str]]:
    """Return the commands to run, in their order. tool: the program of the profiler nsys or ncu.

    Raise UserError for a command that cannot be profiled.
    """
    if options.kernel and options.with_ != "ncu":
        raise UserError(f"--kernel is for --with ncu: --with {options.with_} records all kernels")
    if options.with_ == "ncu" and not words:
        return ncu.commands(options.kernel or "", (), out, tool=tool)
    command = _command(words)
    trained = _is_training(command)
    if options.with_ in ("trace", "torch"):
        return [_trained(command, options, [f"--profile.{options.with_}", str(out / options.with_)], out)]
    if trained:
        command = _trained(command, options, ["--profile.nvtx"], out)
    if options.with_ == "nsys":
        return [nsys.command(command, out, trained, tool=tool)]
    return ncu.commands(options.kernel or "", command, out, marked=trained, tool=tool)


def _tool(options: ProfileCommand) -> str:
    """Return the path of the profiler's program. Raise UserError if it cannot record here."""
    if options.with_ == "trace":
        return ""
    from tpfuse.tools.doctor import profiler  # torch takes seconds
    from tpfuse.tools.machine import Machine

    path, problem = profiler(Machine(), options.with_)
    if problem:
        raise UserError(problem)
    return path


def _result(options: ProfileCommand, out: Path, tool: str) -> str:
    """Return what a profiler has found, in words, and the files that it has written."""
    if options.with_ == "trace":
        return summary_of(out)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.relative_to(out).parts[0] != RUN)
    written = f"files in {out}: {', '.join(file for file in files if (out / file).is_file())}"
    if options.with_ != "nsys":
        return written
    reports = sorted(out.glob("*.nsys-rep"))
    return "\n\n".join([*(nsys.summarise(report, tool=tool) for report in reports), written])


def _command(words: Sequence[str]) -> list[str]:
    """Return the program that the user means, with its arguments."""
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


def _is_training(command: Sequence[str]) -> bool:
    """Return whether a command runs `tpfuse train`, perhaps by torchrun."""
    words = [Path(word).name for word in command]
    return any(pair == ("tpfuse", "train") for pair in itertools.pairwise(words))


def _trained(command: Sequence[str], options: ProfileCommand, flags: Sequence[str], out: Path) -> list[str]:
    """Return a command that runs `tpfuse train`, with the flags that record the steps and end after them."""
    if not _is_training(command):
        raise UserError(
            f"--with {options.with_} records the steps of `tpfuse train`, and this command is another program: in that"
            " program, use tpfuse.profile.record(FOLDER, model, group), and then: tpfuse profile summary FOLDER"
        )
    if any(word.partition("=")[0] == "--resume" for word in command):
        raise UserError("a profile is a run of its own: leave out --resume, or give `tpfuse train` --profile.trace")
    steps, last = options.steps, profiled_steps(options.steps)[-1]
    ending = ["--train.steps", str(last), "--train.eval-every", "0", "--out", str(out / RUN)]
    return [*command, "--profile.steps", steps, *flags, *ending]


def _run(command: Sequence[str]) -> int:
    """Run a command, which gets Ctrl-C and SIGTERM too, and return its exit status."""
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
    """Write the explanation of a profile's traces beside them, and return it as text. Raise UserError.

    folder: one that `tpfuse profile` has written, or one that has the files of `tpfuse.profile.record`.
    """
    from tpfuse.profile.picture import draw_profile  # matplotlib takes a second

    traces = read_traces(folder / TRACE if (folder / TRACE).is_dir() else folder)
    document = summarise(traces)
    replace_file(folder / SUMMARY, json.dumps(document, indent=1))
    write_perfetto(traces, folder / "trace.json")
    draw_profile(document, folder / "profile.png")
    files = f"files in {folder}: {SUMMARY}, trace.json (for ui.perfetto.dev), profile.png"
    return "\n".join([table(document), "", *document["sentences"], "", files])
