"""The arguments of launches become the signature that Triton would compile at run time."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tpfuse.kernels.launch import Launch
from tpfuse.tools.recorded import Job, _pairs, source_of


@triton.jit(do_not_specialize=["seed"])
def kernel(x_ptr, y_ptr, n, stride, seed, scale, flag, BLOCK: tl.constexpr):
    pass


ARGUMENTS: dict[str, Any] = {
    "x_ptr": torch.empty(64, 64, dtype=torch.bfloat16, device="meta"),
    "y_ptr": None,
    "n": 100,
    "stride": 64,
    "seed": 1,
    "scale": 1.0,
    "flag": True,
    "BLOCK": 128,
}


def source(**changes: Any) -> Any:
    # Kernels are interpreted in this process; launches of compiled kernels contain a JITFunction.
    compiled_kernel = JITFunction(kernel.fn, do_not_specialize=["seed"])
    return source_of(Launch(compiled_kernel, (1,), ARGUMENTS | changes, num_warps=4, num_stages=2), "sm_90")


def divisible(recorded: Any) -> set[str]:
    """Return the names of the arguments that are marked as multiples of 16."""
    return {
        recorded.fn.arg_names[path[0]] for path, marks in recorded.attrs.items() if ["tt.divisibility", 16] in marks
    }


SIGNATURE = {
    "x_ptr": "*bf16", "y_ptr": "constexpr", "n": "i32", "stride": "i32",
    "seed": "i32", "scale": "fp32", "flag": "u1", "BLOCK": "constexpr",
}  # fmt: skip
X = ARGUMENTS["x_ptr"]


def pointer(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"y_ptr": torch.empty(4, dtype=dtype, device="meta")}


@pytest.mark.parametrize(
    ("changes", "types", "multiples"),
    [
        ({}, {}, {"x_ptr", "stride"}),
        (pointer(torch.float16), {"y_ptr": "*fp16"}, {"x_ptr", "y_ptr", "stride"}),
        (pointer(torch.int64), {"y_ptr": "*i64"}, {"x_ptr", "y_ptr", "stride"}),
        (pointer(torch.bool), {"y_ptr": "*u1"}, {"x_ptr", "y_ptr", "stride"}),
        ({"x_ptr": X[:, 8:]}, {}, {"x_ptr", "stride"}),  # a view is aligned as its first element
        ({"x_ptr": X[:, 1:]}, {}, {"stride"}),
        ({"stride": 1, "n": 2**31}, {"stride": "constexpr", "n": "i64"}, {"x_ptr", "n"}),
        ({"n": 2**31 - 1}, {}, {"x_ptr", "stride"}),
        ({"seed": 16}, {}, {"x_ptr", "stride"}),  # the kernel declares that seed is not specialized
        (
            {"x_ptr": TensorDescriptor.from_tensor(X, [32, 16])},
            {"x_ptr": "tensordesc<bf16[32, 16]>"},
            {"stride"},
        ),
    ],
)
def test_signature_of_a_launch(changes: dict[str, Any], types: dict[str, str], multiples: set[str]) -> None:
    recorded = source(**changes)
    assert recorded.signature == SIGNATURE | types
    assert recorded.constants == {
        path: value
        for path, name, value in (((1,), "y_ptr", None), ((3,), "stride", 1), ((7,), "BLOCK", 128))
        if recorded.signature[name] == "constexpr"
    }
    assert divisible(recorded) == multiples


def test_a_table_shows_declared_constants_and_missing_pointers() -> None:
    job = Job("x", "sm_90", "bfloat16", source(stride=1), 4, 2)
    assert job.constants == {"y_ptr": None, "BLOCK": 128}


def test_float16_is_compiled_for_one_family() -> None:
    both, families = ("bfloat16", "float16", "float32"), ("sm_80", "sm_90")
    all_pairs = {(family, dtype) for family in families for dtype in both}
    assert set(_pairs(families, both)) == all_pairs - {("sm_80", "float16")}
    assert set(_pairs(("sm_80",), both)) == {("sm_80", dtype) for dtype in both}
    assert set(_pairs(families, ("float16",))) == {(family, "float16") for family in families}
