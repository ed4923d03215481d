"""Options of `tpfuse train` that exclude each other: one table, which is the check and a part of docs/training.md."""

from operator import attrgetter
from typing import NamedTuple

from tpfuse.errors import UserError
from tpfuse.train.options import TrainCommand

GRAPH = "--train.cuda-graph"
_USUAL = TrainCommand()


class Rule(NamedTuple):
    """An option, another one that it cannot be together with, and why not.

    An option is a flag with the values that are meant: words, or numbers from N on as "N+". Without a value, any but
    the default is meant.
    """

    option: str
    other: str
    reason: str


RULES = (
    Rule(
        "--train.autocast bfloat16 float16",
        "--train.dtype float64 bfloat16 float16",
        "since autocast keeps parameters in float32",
    ),
    Rule("--optim.state-dtype bfloat16", "--train.dtype float64", "whose precision the moments would lose"),
    Rule("--data.val-fraction", "--data.val-path", "whose whole text validates"),
    Rule("--data.documents mask", "--train.compile", "since the number of documents varies"),
    Rule("--train.offload-activations", "--train.compile", "which has no hooks"),
    Rule("--parallel.pp-schedule zero_bubble zbv", "--train.compile", "which cannot split backward passes"),
    Rule("--train.recompute selective", "--model.from", "since only blocks of the GPT have parts that can be chosen"),
    Rule("--parallel.cp-balance contiguous striped", "--model.from", "whose sequences are balanced by zigzag"),
    Rule("--train.virtual-ranks", "--train.dtype float64", "which is for comparisons within rounding"),
    Rule("--train.virtual-ranks", "--train.compile", "whose kernels depend on the pipeline's stages"),
    Rule("--train.virtual-ranks", "--zero.compression", "which compresses the sums of nodes"),
    Rule("--train.virtual-ranks", "--zero.gradient-dtype parameter", "in which sums would be rounded in parts"),
    Rule("--train.virtual-ranks", "--zero.reduce-dtype parameter", "in which sums would be rounded in parts"),
    Rule(f"{GRAPH} yes", "--train.virtual-ranks", "whose sums the host puts in order"),
    Rule(f"{GRAPH} yes", "--model.from", "whose code may compute on the host"),
    Rule(f"{GRAPH} yes", "--data.documents mask", "since the number of documents varies"),
    Rule(f"{GRAPH} yes", "--train.compile", "which may compile again in any step"),
    Rule(f"{GRAPH} yes", "--train.offload-activations", "which takes memory of the host in each step"),
    Rule(f"{GRAPH} yes", "--parallel.pp 2+", "whose messages cannot be captured"),
    Rule(f"{GRAPH} yes", "--parallel.cp 2+", "whose messages cannot be captured"),
    Rule(f"{GRAPH} yes", "--zero.stage 2+", "whose gradients have other memory in each step (stage 1 can)"),
    Rule(f"{GRAPH} yes", "--debug.fingerprint", "since a replay's operations are not compared"),
    Rule(f"{GRAPH} yes", "--profile.trace", "since the host does not see a replay"),
    Rule(f"{GRAPH} yes", "--profile.torch", "since the host does not see a replay"),
    Rule(f"{GRAPH} yes", "--profile.nvtx", "since the host does not see a replay"),
)


def check_rules(options: TrainCommand) -> None:
    """Raise UserError for the first rule both of whose options were given."""
    for rule in RULES:
        if (first := _given(options, rule.option)) and (second := _given(options, rule.other)):
            raise UserError(f"{first} is not for {second}, {rule.reason}: leave one of them out")


def forbids_graph(options: TrainCommand) -> bool:
    """Return whether a step has something that a CUDA graph cannot replay."""
    return any(_given(options, rule.other) for rule in RULES if rule.option.startswith(GRAPH))


def _given(options: TrainCommand, option: str) -> str:
    """Return the option as it was given, if it has one of the values that a rule means, and else ""."""
    flag, *meant = option.split()
    path = flag.removeprefix("--").replace("-", "_").replace(".from", ".from_")
    value, usual = map(attrgetter(path), (options, _USUAL))
    if not meant:
        return flag if value != usual else ""
    found = any(value >= int(word[:-1]) if word.endswith("+") else value == word for word in meant)
    return "" if not found else flag if value == "yes" else f"{flag} {value}"
