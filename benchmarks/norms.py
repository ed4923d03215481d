"""Cases of the norms. They move memory and nothing else, so that the share of the copy bandwidth is what counts.

The rows that figures are drawn from hold 256 MiB in bf16: several times any L2 cache, which would otherwise keep a part
of what is written. The others have the tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from benchmarks.contenders import Function, Operator, compiled, fresh_compiler
from benchmarks.harness import OURS, Case, Scale, Stage, Work
from benchmarks.shapes import MODELS, TOKENS, Model

LARGE = 1 << 27  # elements
EAGER, COMPILED, LIGER = "eager", "torch.compile", "Liger-Kernel"


def _build(
    rows: int,
    width: int,
    bias: bool,
    statistics: int,
    ours: Function,
    plain: Function,
    liger: Function,
    stage: Stage,
) -> tuple[Callable[[], dict[str, str]], list[Work]]:
    inputs: dict[str, Tensor] = {"x": stage.normal(rows, width), "weight": 1 + stage.normal(width, scale=0.1)}
    if bias:
        inputs["bias"] = stage.normal(width, scale=0.1)
    functions: Mapping[str, Function] = {OURS: ours, EAGER: plain}
    fresh_compiler()
    functions |= {COMPILED: compiled(plain, stage)}
    if not stage.interpreted:
        functions |= {LIGER: liger}
    tensor, kept, vectors = 2 * rows * width, 4 * statistics * rows, 2 * len(inputs) * width
    operator = Operator(
        inputs=inputs,
        grad=stage.normal(rows, width),
        reference=plain,
        functions=functions,
        costs={"forward": (0.0, 2 * tensor + kept + vectors), "backward": (0.0, 3 * tensor + kept + vectors)},
    )
    return operator.check, operator.works()


def norm_cases(
    operator: str, scale: Scale, models: tuple[Model, ...], bias: bool, ours: Function, plain: Function, liger: Function
) -> list[Case]:
    """Cases of a norm over the widths of `models`, with or without a bias. ours, plain, liger: of x, weight(, bias)."""
    statistics = 2 if bias else 1  # mean and 1 / deviation; 1 / root mean square

    def case(name: str, rows: int, width: int, asked: bool) -> Case:
        build = partial(_build, rows, width, bias, statistics, ours, plain, liger)
        return Case(operator, f"{name}, {rows} x {width}", build, asked)

    if scale == "tiny":
        return [case("tiny", 24, 48, True)]
    large = [case(model.name, LARGE // model.width, model.width, True) for model in models]
    if scale == "quick":
        return large[-1:]
    return large + [case(model.name, TOKENS, model.width, False) for model in models]


GPT2 = tuple(model for model in MODELS if not model.gated)
LLAMA = tuple(model for model in MODELS if model.gated)
