"""The rows of configurations.toml fill the waves of tiles of known models' products, whose shapes are right."""

import torch

from benchmarks.shapes import LLAMA_3, LLAMA_7B, MODELS, TENSOR_PARALLEL, layers
from tpfuse.kernels.configurations import Configuration, choose_configuration
from tpfuse.kernels.launch import multiprocessors, recording

CHOSEN = [model for model in (*MODELS, LLAMA_3) if model != LLAMA_7B]


def test_parameters_of_the_models() -> None:
    """The weights of a block times the number of blocks give the sizes that the models are named after."""
    blocks = {"124m": 12, "350m": 24, "774m": 36, "1558m": 48, "7b": 32, "70b": 80, "8b": 32}
    rounded = {}
    for m in (*MODELS, LLAMA_3):
        block = sum(n * k for _, n, k, _ in layers(m, 1))
        rounded[m.name] = round((blocks[m.name] * block + (2 if m.gated else 1) * m.vocabulary * m.width) / 1e6)
    assert rounded == {"124m": 124, "350m": 353, "774m": 772, "1558m": 1555, "7b": 6738, "70b": 68975, "8b": 8030}


def test_idle_multiprocessors() -> None:
    row = Configuration("toy", "sm_90", 16, {"idle": 20}, {"BLOCK_M": 128, "BLOCK_N": 256}, 4, 3, "")
    sizes = {"M": 1280, "N": 256, "programs": 10}
    assert row.idle(sizes) == 0 and row.fits(16, sizes)
    assert round(row.idle(sizes | {"M": 1281})) == 50, "another wave"
    assert round(row.idle(sizes | {"N": 192})) == 25, "a tile over the edge"
    assert round(row.idle(sizes | {"M": 128, "chunks": 9})) == 10
    assert row.idle(sizes | {"programs": 13}) > 20 and not row.fits(16, sizes | {"programs": 13})


def full(operator: str, tokens: int, n: int, k: int, gated: bool, ranks: int) -> float:
    """Return the share of an H100's time that the tiles of a product of one of `ranks` ranks use, in bf16.

    It multiplies x [tokens, k] with weight [n, k], or [2 n, k] for a gated pair. A product of T tiles on P
    multiprocessors takes cdiv(T, P) waves; the last one and tiles beyond the edges leave a part unused.
    """
    with recording("sm_90"):
        programs = multiprocessors(torch.device("meta")) - (operator == "all_gather_gemm")
        sizes = {"M": -(-tokens // ranks), "N": n, "K": k, "chunks": ranks, "programs": programs}
        sizes |= {"gated": int(gated), "unaligned": int(k % 8 != 0)}
        row = choose_configuration(operator, torch.device("meta"), torch.bfloat16, **sizes)
    return 1 - row.idle(sizes) / 100


def test_the_waves_of_known_models_are_full() -> None:
    """The mean over the products of a layer and the numbers of tokens is weighted by time."""
    means = {}
    for model in CHOSEN:
        for ranks in TENSOR_PARALLEL:
            operations, time = 0, 0.0
            for layer, n, k, activation in layers(model, ranks):
                gated = activation == "swiglu"
                parallel = "all_gather_gemm" if layer in ("qkv", "up") else "gemm_reduce_scatter"
                operator = "gemm" if ranks == 1 else parallel
                for tokens in (2048, 4096, 8192, 16384):
                    operations += n * k * tokens
                    time += n * k * tokens / full(operator, tokens, n // (1 + gated), k, gated, ranks)
            if operations:
                means[model.name, ranks] = operations / time
    assert len(means) == 19
    assert min(means.values()) >= 0.85, sorted(means.items(), key=lambda item: item[1])[:3]
