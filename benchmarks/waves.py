"""Compute how full the waves of tiles of a product's programs are, for the layers of known models.

    python -m benchmarks.waves > benchmarks/results/waves.md

A product of T tiles on P multiprocessors takes cdiv(T, P) waves. Its result needs M N / (P x the elements of a tile) of
that time; the rest is left unused by the last wave and by tiles that extend beyond the edges. This is arithmetic alone:
nothing is measured, and no other part of a product's time is included.
"""

from collections.abc import Iterator

import torch

from benchmarks.shapes import TENSOR_PARALLEL, LayerSizes, layers, model
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import multiprocessors, recording

TOKENS = (2048, 4096, 8192, 16384)
# The GPT-2 models and Llama 2 70B, whose products Llama 3 70B shares; Llama 3 8B: arXiv:2407.21783, table 3.
MODELS = (
    *(model(name) for name in ("124m", "350m", "774m", "1558m")),
    LayerSizes("8b", 4096, 32, 8, 14336, True, 128256),
    model("70b"),
)


def full(operator: str, tokens: int, n: int, k: int, gated: bool, ranks: int) -> float:
    """Return the share of the multiprocessors' time that the tiles of a product of one of `ranks` ranks use, in bf16.

    It multiplies x [tokens, k] with weight [n, k], or [2 n, k] for a gated pair.
    """
    with recording("sm_90"):
        programs = multiprocessors(torch.device("meta")) - (operator == "all_gather_gemm")
        sizes = {"M": -(-tokens // ranks), "N": n, "K": k, "chunks": ranks, "programs": programs}
        sizes |= {"gated": int(gated), "unaligned": int(k % 8 != 0)}
        row = choose_configuration(operator, torch.device("meta"), torch.bfloat16, **sizes)
    return 1 - row.idle(sizes) / 100


def products(shapes: LayerSizes, ranks: int, tokens: int) -> tuple[list[float], float]:
    """Return `full` of each product of a layer forward with sequence parallelism, and its mean weighted by time."""
    each, time, flops = [], 0.0, 0
    for layer, n, k, activation in layers(shapes, ranks):
        gated = activation == "swiglu"
        parallel = "all_gather_gemm" if layer in ("qkv", "up") else "gemm_reduce_scatter"
        each.append(full("gemm" if ranks == 1 else parallel, tokens, n // (1 + gated), k, gated, ranks))
        flops += n * k
        time += n * k / each[-1]
    return each, flops / time if each else 0.0


def shares() -> Iterator[tuple[LayerSizes, int, int, list[float], float]]:
    """Yield (model, ranks, tokens, the share of each product, their mean weighted by time).

    Only numbers of ranks that divide the heads are included.
    """
    for shapes in MODELS:
        for ranks in TENSOR_PARALLEL:
            for tokens in TOKENS:
                each, weighted = products(shapes, ranks, tokens)
                if each:
                    yield shapes, ranks, tokens, each, weighted


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "# How full the waves of tiles are",
        "",
        "For bfloat16 on 132 multiprocessors (sm_90); arithmetic, nothing measured. `python -m benchmarks.waves`",
        "writes this file and a test compares it. tp 1 is `gemm`, though plain products are cuBLAS's there.",
        "",
        "| model | tp | tokens | qkv | proj | up | down | weighted by time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for shapes, ranks, tokens, each, weighted in shares():
        cells = [shapes.name, ranks, tokens, *(f"{share:.2f}" for share in (*each, weighted))]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
