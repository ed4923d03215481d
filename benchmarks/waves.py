"""Compute how full the waves of tiles of a product's programs are, for the layers of known models.

    python -m benchmarks.waves > benchmarks/results/waves.md

A product of T tiles on P multiprocessors takes cdiv(T, P) waves. Its result needs M N / (P x the elements of a tile) of
that time; the rest is left unused by the last wave and by tiles that extend beyond the edges. This is arithmetic alone:
nothing is measured, and no other part of a product's time is included.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class WaveProduct:
    """A product of one of `ranks` ranks: x [tokens, K] and weight [N, K], or [2 N, K] for a gated pair."""

    operator: str  # an operator of configurations.toml
    tokens: int
    N: int
    K: int
    gated: bool
    ranks: int

    @property
    def flops(self) -> float:
        """Return the operations of one rank."""
        return 2.0 * self.tokens * self.N * self.K * (2 if self.gated else 1)

    def full(self, family: str = "sm_90") -> float:
        """Return the share of the multiprocessors' time that its tiles use, in bfloat16."""
        chunk = -(-self.tokens // self.ranks)
        with recording(family):
            programs = multiprocessors(torch.device("meta")) - (self.operator == "all_gather_gemm")
            sizes = {"M": chunk, "N": self.N, "K": self.K, "chunks": self.ranks, "programs": programs}
            sizes |= {"gated": int(self.gated), "unaligned": int(self.K % 8 != 0)}
            row = choose_configuration(self.operator, torch.device("meta"), torch.bfloat16, **sizes)
        return 1 - row.idle(sizes) / 100


def products(shapes: LayerSizes, ranks: int, tokens: int) -> list[WaveProduct]:
    """Return the products of a layer forward, with sequence parallelism, in the order of `shapes.layers`."""
    result = []
    for layer, n, k, activation in layers(shapes, ranks):
        gated = activation == "swiglu"
        parallel = "all_gather_gemm" if layer in ("qkv", "up") else "gemm_reduce_scatter"
        result.append(WaveProduct("gemm" if ranks == 1 else parallel, tokens, n // (1 + gated), k, gated, ranks))
    return result


def shares() -> Iterator[tuple[LayerSizes, int, int, list[float], float]]:
    """Yield (model, ranks, tokens, the share of each product, their mean weighted by time).

    Only numbers of ranks that divide the heads are included.
    """
    for shapes in MODELS:
        for ranks in TENSOR_PARALLEL:
            for tokens in TOKENS:
                layer = products(shapes, ranks, tokens)
                each = [product.full() for product in layer]
                if each:
                    time = sum(product.flops / full for product, full in zip(layer, each, strict=True))
                    yield shapes, ranks, tokens, each, sum(product.flops for product in layer) / time


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
