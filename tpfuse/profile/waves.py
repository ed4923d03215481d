"""How full the waves of tiles are that a product's programs take, for the layers of known models.

    python -m tpfuse.profile.waves > benchmarks/results/waves.md

A product of T tiles on P multiprocessors takes cdiv(T, P) waves. Of that time its result needs M N / (P x the elements
of a tile); the rest is what the last wave and tiles that hang over the edges leave unused. Arithmetic alone: nothing is
measured, and nothing else of a product's time is in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tpfuse.kernels.configurations import choose
from tpfuse.kernels.launch import multiprocessors, recording

TOKENS = (2048, 4096, 8192, 16384)
TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Model:
    """Features of a transformer's layers. kv: of keys, and of values; gated: whether `up` is a gated pair."""

    name: str
    width: int
    heads: int
    kv: int
    hidden: int
    gated: bool


# GPT-2: Radford et al. 2019, table 2 (models/*.toml); Llama 3: arXiv:2407.21783, table 3.
MODELS = (
    Model("GPT-2 124M", 768, 12, 768, 3072, False),
    Model("GPT-2 350M", 1024, 16, 1024, 4096, False),
    Model("GPT-2 774M", 1280, 20, 1280, 5120, False),
    Model("GPT-2 1558M", 1600, 25, 1600, 6400, False),
    Model("Llama 3 8B", 4096, 32, 1024, 14336, True),
    Model("Llama 3 70B", 8192, 64, 1024, 28672, True),
)


@dataclass(frozen=True)
class Product:
    """A product of one rank: x [tokens, K] and weight [N, K], for a gated pair twice that."""

    layer: str
    operator: str  # of configurations.toml
    tokens: int
    N: int
    K: int
    gated: bool
    ranks: int

    @property
    def flops(self) -> float:
        """Of one rank."""
        return 2.0 * self.tokens * self.N * self.K * (2 if self.gated else 1)

    def full(self, family: str = "sm_90") -> float:
        """The share of the multiprocessors' time that its tiles use, in bfloat16."""
        chunk = -(-self.tokens // self.ranks)
        with recording(family):
            programs = multiprocessors(torch.device("meta")) - (self.operator == "all_gather_gemm")
            sizes = {"M": chunk, "N": self.N, "K": self.K, "chunks": self.ranks, "programs": programs}
            sizes |= {"gated": int(self.gated), "unaligned": int(self.K % 8 != 0)}
            row = choose(self.operator, torch.device("meta"), torch.bfloat16, **sizes)
        return 1 - row.idle(sizes) / 100


def products(model: Model, ranks: int, tokens: int) -> list[Product]:
    """The four products of a layer forward, `ranks` of them tensor-parallel with sequence parallelism."""
    first, last = ("gemm", "gemm") if ranks == 1 else ("all_gather_gemm", "gemm_reduce_scatter")
    width, hidden = model.width, model.hidden
    return [
        Product("qkv", first, tokens, (width + 2 * model.kv) // ranks, width, False, ranks),
        Product("proj", last, tokens, width, width // ranks, False, ranks),
        Product("up", first, tokens, hidden // ranks, width, model.gated, ranks),
        Product("down", last, tokens, width, hidden // ranks, False, ranks),
    ]


def shares() -> Iterator[tuple[Model, int, int, list[float], float]]:
    """(model, ranks, tokens, the share of each product, all of them weighted by time) where ranks divide the heads."""
    for model in MODELS:
        for ranks in TENSOR_PARALLEL:
            for tokens in TOKENS if model.heads % ranks == 0 else ():
                layer = products(model, ranks, tokens)
                each = [product.full() for product in layer]
                time = sum(product.flops / full for product, full in zip(layer, each, strict=True))
                yield model, ranks, tokens, each, sum(product.flops for product in layer) / time


def table() -> str:
    """Markdown."""
    lines = [
        "# How full the waves of tiles are",
        "",
        "For bfloat16 on 132 multiprocessors (sm_90); arithmetic, nothing measured. `python -m tpfuse.profile.waves`",
        "writes this file and a test compares it. tp 1 is `gemm`, though plain products are cuBLAS's there.",
        "",
        "| model | tp | tokens | qkv | proj | up | down | weighted by time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, ranks, tokens, each, weighted in shares():
        cells = [model.name, ranks, tokens, *(f"{share:.2f}" for share in (*each, weighted))]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
