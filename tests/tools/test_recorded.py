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


def divisible(made: Any) -> set[str]:
    """Return the names of the arguments that are marked as multiples of 16."""
    return {made.fn.arg_names[path[0]] for path, marks in made.attrs.items() if ["tt.divisibility", 16] in marks}


def test_a_whole_signature() -> None:
    made = source()
    assert made.signature == {
        "x_ptr": "*bf16",
        "y_ptr": "constexpr",
        "n": "i32",
        "stride": "i32",
        "seed": "i32",
        "scale": "fp32",
        "flag": "u1",
        "BLOCK": "constexpr",
    }
    assert made.constants == {(1,): None, (7,): 128}
    assert divisible(made) == {"x_ptr", "stride"}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float16, "*fp16"),
        (torch.float32, "*fp32"),
        (torch.int64, "*i64"),
        (torch.int32, "*i32"),
        (torch.bool, "*u1"),
    ],
)
def test_pointers(dtype: torch.dtype, name: str) -> None:
    assert source(y_ptr=torch.empty(4, dtype=dtype, device="meta")).signature["y_ptr"] == name


def test_a_view_is_aligned_as_its_first_element() -> None:
    x = ARGUMENTS["x_ptr"]
    assert "x_ptr" in divisible(source(x_ptr=x[:, 8:]))
    assert "x_ptr" not in divisible(source(x_ptr=x[:, 1:]))


def test_integers_are_constant_at_one_and_wide_where_they_must_be() -> None:
    made = source(stride=1, n=2**31)
    assert made.signature["stride"] == "constexpr"
    assert made.constants[(3,)] == 1
    assert made.signature["n"] == "i64"
    assert "n" in divisible(made)
    assert source(n=2**31 - 1).signature["n"] == "i32"


def test_what_is_not_to_be_specialised_is_not() -> None:
    assert source(seed=1).signature["seed"] == source(seed=16).signature["seed"] == "i32"
    assert "seed" not in divisible(source(seed=16))


def test_descriptors() -> None:
    descriptor = TensorDescriptor.from_tensor(ARGUMENTS["x_ptr"], [32, 16])
    assert source(x_ptr=descriptor).signature["x_ptr"] == "tensordesc<bf16[32, 16]>"


def test_the_constants_that_a_table_shows_are_declared_ones_and_missing_pointers() -> None:
    job = Job("x", "sm_90", "bfloat16", source(stride=1), 4, 2)
    assert job.constants == {"y_ptr": None, "BLOCK": 128}


def test_families_share_one_float16() -> None:
    both, families = ("bfloat16", "float16", "float32"), ("sm_80", "sm_90")
    assert set(_pairs(families, both)) == {(family, dtype) for family in families for dtype in both} - {
        ("sm_80", "float16")
    }
    assert set(_pairs(("sm_80",), both)) == {("sm_80", dtype) for dtype in both}
    assert set(_pairs(families, ("float16",))) == {(family, "float16") for family in families}
