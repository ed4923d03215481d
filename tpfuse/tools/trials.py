"""The trials of `tpfuse tune`: launchers at shapes of the models.

A trial belongs to every row of configurations.toml that its launcher chooses at these sizes. GPT-2's shapes (124M,
1558M) and those of 7B and 70B models at some tensor-parallel sizes, 8192 tokens.
"""

from typing import Any

from tpfuse.tools.trial import Trial
from tpfuse.tools.trials_products import AllGatherGemm, Attention, Gemm
from tpfuse.tools.trials_rows import AdamW, CrossEntropy, Dropout, Merge, Norm, Rope


def trials() -> list[Trial]:
    """All of them."""
    tokens = 8192
    shapes: list[Any] = [
        Gemm("7b tp4 up", tokens, 5504, 4096, "swiglu"),
        Gemm("1558m tp1 up", tokens, 6400, 1600, "gelu_tanh"),
        Gemm("124m tp1 up", tokens, 3072, 768, "gelu_tanh"),
        Gemm("7b tp1 proj", tokens, 4096, 4096, None),
        Gemm("70b tp8 down", tokens, 8192, 3584, None),
        Gemm("7b tp1 proj of 16 tokens", 16, 4096, 4096, None),
        Gemm("unaligned", tokens, 4096, 1001, None),
        AllGatherGemm("70b tp8 up", 8, 1024, 7168, 8192, "swiglu"),
        AllGatherGemm("70b tp8 qkv", 8, 1024, 1280, 8192, None),
        AllGatherGemm("7b tp4 qkv", 4, 2048, 3072, 4096, None),
        Attention("heads of 64, 4096 positions", 16, 16, 4096, 64),
        Attention("heads of 128, 4096 positions", 16, 16, 4096, 128),
        Attention("heads of 256, 4096 positions", 8, 8, 4096, 256),
        Attention("70b tp4, 4096 positions", 16, 2, 4096, 128),
        *(Norm(f"width {width}", (1 << 26) // width, width) for width in (256, 768, 1600, 4096, 8192)),
        Rope("7b tp1 rope", 4096, 32, 32, 128),
        Rope("heads of 64", 4096, 32, 32, 64),
        Merge("16 heads of 64", 16, 4096, 64),
        Merge("16 heads of 128", 16, 4096, 128),
        Dropout("124m dropout", 8 * tokens, 768),
        AdamW("124m adamw", 124_439_808),
        *(CrossEntropy(f"vocabulary {size}", tokens, size) for size in (50257, 32000, 1000)),
    ]
    return [trial for shape in shapes for trial in shape.trials()]


def tiny_trials() -> list[Trial]:
    """One of each kind, small enough for the interpreter."""
    shapes: list[Any] = [
        Gemm("tiny", 20, 32, 16, "gelu_tanh"),
        Gemm("tiny gated", 20, 32, 16, "swiglu"),
        AllGatherGemm("tiny", 2, 10, 32, 16, "swiglu"),
        Attention("tiny", 2, 1, 20, 16),
        Norm("tiny", 12, 40),
        CrossEntropy("tiny", 12, 40),
        Rope("tiny", 6, 2, 1, 16),
        Merge("tiny", 2, 6, 16),
        Dropout("tiny", 12, 40),
        AdamW("tiny", 100),
    ]
    return [trial for shape in shapes for trial in shape.trials()]
