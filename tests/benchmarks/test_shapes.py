"""The shapes are those of the published models, and the benchmarks of gemm use them."""

from benchmarks.bench_gemm import ASKED, cases
from benchmarks.shapes import MODELS, layers


def test_parameters_of_the_models() -> None:
    """The weights of a block times the number of blocks give the sizes that the models are named after."""
    blocks = {"124m": 12, "350m": 24, "774m": 36, "1558m": 48, "7b": 32, "70b": 80}
    sizes = {m.name: blocks[m.name] * sum(n * k for _, n, k, _ in layers(m, 1)) for m in MODELS}
    total = {m.name: sizes[m.name] + (2 if m.gated else 1) * m.vocabulary * m.width for m in MODELS}
    rounded = {name: round(size / 1e6) for name, size in total.items()}
    assert rounded == {"124m": 124, "350m": 353, "774m": 772, "1558m": 1555, "7b": 6738, "70b": 68975}


def test_every_figure_has_its_cases() -> None:
    asked = [case for case in cases(tiny=False) if case.asked]
    for name in ASKED:
        for what in ("plain", "bias, gelu", "bias, gelu_tanh"):
            assert [case for case in asked if case.name.startswith(name + ",") and case.name.endswith(what)], (
                name,
                what,
            )
    every = [case.name for case in cases(tiny=False)]
    assert len(every) == len(set(every)) > 70
