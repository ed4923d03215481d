"""The sizes of GPT-2 (Radford et al. 2019), Llama 2 (arXiv:2307.09288) and Llama 3 8B (arXiv:2407.21783, table 3)."""

from collections.abc import Iterator
from dataclasses import dataclass

TOKENS = 8192  # tokens of a micro-batch: 8 x 1024 for GPT-2, 2 x 4096 for the larger models
TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class LayerSizes:
    """The sizes that determine the shapes. gated: Llama's MLP, beside RMSNorm."""

    name: str
    width: int
    heads: int
    kv_heads: int
    mlp: int
    gated: bool
    vocabulary: int


GPT2 = tuple(
    LayerSizes(name, width, width // 64, width // 64, 4 * width, False, 50257)
    for name, width in (("124m", 768), ("350m", 1024), ("774m", 1280), ("1558m", 1600))
)
LLAMA_7B = LayerSizes("7b", 4096, 32, 32, 11008, True, 32000)
LLAMA_70B = LayerSizes("70b", 8192, 64, 8, 28672, True, 32000)
LLAMA_3 = LayerSizes("8b", 4096, 32, 8, 14336, True, 128256)
MODELS = (*GPT2, LLAMA_7B, LLAMA_70B)


def layers(model: LayerSizes, tp: int) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield (layer, N, K, activation) of one of tp ranks, which multiplies x [M, K] with a weight [N, K].

    "up" has the gate's columns too. Nothing is yielded where tp does not divide the heads.
    """
    if model.heads % tp or model.kv_heads % tp or model.mlp % tp:
        return
    activation = "swiglu" if model.gated else "gelu_tanh"
    yield "qkv", (model.heads + 2 * model.kv_heads) * (model.width // model.heads) // tp, model.width, None
    yield "proj", model.width, model.width // tp, None
    yield "up", model.mlp * (2 if model.gated else 1) // tp, model.width, activation
    yield "down", model.width, model.mlp // tp, None
