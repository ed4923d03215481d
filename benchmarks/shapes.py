"""The shapes of the models that tpfuse is made for, as worked arithmetic.

| name  | width C | heads | key/value heads | MLP F | vocabulary | source                                           |
|-------|---------|-------|-----------------|-------|------------|--------------------------------------------------|
| 124m  | 768     | 12    | 12              | 4 C   | 50257      | GPT-2 (Radford et al. 2019), models/gpt2-*.toml  |
| 350m  | 1024    | 16    | 16              | 4 C   | 50257      | the same                                         |
| 774m  | 1280    | 20    | 20              | 4 C   | 50257      | the same                                         |
| 1558m | 1600    | 25    | 25              | 4 C   | 50257      | the same                                         |
| 7b    | 4096    | 32    | 32              | 11008 | 32000      | Llama 2 (arXiv:2307.09288): gated MLP, RMSNorm   |
| 70b   | 8192    | 64    | 8               | 28672 | 32000      | the same                                         |

With t tensor-parallel ranks and head size D = C / heads, one rank multiplies M tokens with these weights [N, K]:

    qkv    N = (heads + 2 kv heads) D / t   K = C          column-parallel
    proj   N = C                            K = C / t      row-parallel
    up     N = F / t, gated 2 F / t         K = C          column-parallel, with the activation
    down   N = C                            K = F / t      row-parallel

so "7b tp4 up" is M x 5504 x 4096: the gate's 2752 columns and the up projection's 2752. t must divide the heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

TOKENS = 8192  # tokens of a micro-batch: 8 x 1024 for GPT-2, 2 x 4096 for the larger models
TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class LayerSizes:
    """The sizes that determine the shapes."""

    name: str
    width: int
    heads: int
    kv_heads: int
    mlp: int
    gated: bool
    vocabulary: int

    @property
    def head_size(self) -> int:
        """Return the width of a head."""
        return self.width // self.heads


MODELS = (
    LayerSizes("124m", 768, 12, 12, 4 * 768, False, 50257),
    LayerSizes("350m", 1024, 16, 16, 4 * 1024, False, 50257),
    LayerSizes("774m", 1280, 20, 20, 4 * 1280, False, 50257),
    LayerSizes("1558m", 1600, 25, 25, 4 * 1600, False, 50257),
    LayerSizes("7b", 4096, 32, 32, 11008, True, 32000),
    LayerSizes("70b", 8192, 64, 8, 28672, True, 32000),
)


@dataclass(frozen=True)
class LayerProduct:
    """x [M, K] times weight [N, K]. names: the layers that have this product ("7b tp4 up")."""

    names: tuple[str, ...]
    M: int
    N: int
    K: int
    activation: str | None

    def __str__(self) -> str:
        return f"{self.names[0]}, {self.M} x {self.N} x {self.K}"


def layers(model: LayerSizes, tp: int) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield (layer, N, K, activation) of one rank; nothing where tp does not divide the heads."""
    if model.heads % tp or model.kv_heads % tp or model.mlp % tp:
        return
    activation = "swiglu" if model.gated else "gelu_tanh"
    yield "qkv", (model.heads + 2 * model.kv_heads) * model.head_size // tp, model.width, None
    yield "proj", model.width, model.width // tp, None
    yield "up", model.mlp * (2 if model.gated else 1) // tp, model.width, activation
    yield "down", model.width, model.mlp // tp, None


def products(tokens: int = TOKENS) -> list[LayerProduct]:
    """Return every distinct product of all models and tensor-parallel sizes, in the order of the tables above."""
    names_of: dict[tuple[int, int, str | None], list[str]] = {}
    for model in MODELS:
        for tp in TENSOR_PARALLEL:
            for layer, n, k, activation in layers(model, tp):
                names_of.setdefault((n, k, activation), []).append(f"{model.name} tp{tp} {layer}")
    return [LayerProduct(tuple(names), tokens, n, k, activation) for (n, k, activation), names in names_of.items()]


def model(name: str) -> LayerSizes:
    """Return the model of this name."""
    return next(model for model in MODELS if model.name == name)
