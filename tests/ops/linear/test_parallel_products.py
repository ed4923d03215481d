"""Every tensor-parallel product by every implementation: one suite, made from descriptions of the three products.

`tests.ops.linear.parallel_products` has the checks, test_dispatch.py the tests of the order of ranks, and
test_all_gather_linear.py those of the features that only that product has.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops.linear.parallel_products import PRODUCTS, Case, Tensors
from tests.support.cases import naming
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.ops.activation import ACTIVATIONS
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool

IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "collective", "fused")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

# Tiles of interpreted kernels are 64 rows by 64 columns.
WHOLE_NUMBERS = [Case(F32, (13,), n=9, whole_numbers=True), Case(BF16, (3,), k=9, n=9, whole_numbers=True)]
FEW = {
    "all_gather_linear": [
        Case(F32, (21, 2), k=63, n=50, activation="gelu_tanh"),
        Case(BF16, (5,), k=63, n=50, bias=False),
        Case(F32, (5,), k=63, n=50, activation="swiglu"),
        Case(F32, (13,), n=9, activation="relu", whole_numbers=True),
    ],
    "linear_reduce_scatter": [Case(F32, (21, 2)), Case(BF16, (5,))],
    "linear_all_reduce": [Case(F32, (7, 3)), Case(BF16, (5,), n=9)],
}
MANY = {
    "all_gather_linear": [
        *(Case(F32, (5,), k=63, n=50, activation=name) for name in (*ACTIVATIONS, None)),
        Case(BF16, (21,), k=63, n=50, activation="swiglu"),
        Case(F32, (67,), k=63, n=50, bias=False),
        Case(F32, (1,), k=63, n=50, activation="relu", whole_numbers=True),
        Case(F32, (0,), k=63, n=50, activation="relu"),
        Case(F32, (3, 2, 2), k=63, n=50, bias=False, activation="silu"),
    ],
    "linear_reduce_scatter": [
        Case(F32, (67,), bias=False, residual=False),
        Case(F32, (5,), residual=False),
        Case(BF16, (21,), bias=False),
        Case(F32, (1,)),
        Case(F32, (0,)),
        Case(BF16, (3, 2, 2), bias=False, residual=False),
    ],
    "linear_all_reduce": [
        Case(F32, (131,), bias=False, residual=False),  # longer than the sums that every rank computes by itself
        Case(F32, (5,), n=9, residual=False),
        Case(BF16, (21,), bias=False),
        Case(F32, (1,), n=9),
        Case(F32, (0,), n=9),
        Case(F32, (), n=9),
        Case(BF16, (3, 2, 2), n=9, bias=False, residual=False),
    ],
}
# Torch computes those, which takes no time; the kernels of the fused products have no float64.
OF_TORCH = {
    "all_gather_linear": [Case(F64, (21,), k=63, n=50), Case(F64, (5, 2), bias=False, activation="geglu")],
    "linear_reduce_scatter": [Case(F64, (21,)), Case(F64, (5, 2), bias=False, residual=False)],
    "linear_all_reduce": [Case(F64, (21,), n=9), Case(F64, (131, 2)), Case(F32, (307,), n=33, k=9, whole_numbers=True)],
}


def _check(product: str, name: Implementation, cases: list[Case]) -> list[Tensors]:
    found = []
    with use(implementation=name):
        for case in cases:
            with naming(case):
                found.append(PRODUCTS[product].check(case, dist.group.WORLD))
    return found


def _cases(product: str, name: Implementation, world: int, many: bool) -> list[Case]:
    """Return all cases for torch, which takes no time, and few for interpreted kernels, which take a second each."""
    if name != "fused":
        return FEW[product] + WHOLE_NUMBERS + MANY[product] + OF_TORCH[product]
    if many:
        return MANY[product]
    return FEW[product] + WHOLE_NUMBERS if world != 3 else [FEW[product][1], WHOLE_NUMBERS[0]]


@pytest.mark.parametrize(
    ("name", "world", "many"),
    [
        ("direct", 3, True),
        ("collective", 2, True),
        ("fused", 2, False),
        *exhaustive(("collective", 4, True), ("fused", 2, True), ("fused", 3, False)),
    ],
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_result_and_every_gradient(product: str, name: Implementation, world: int, many: bool) -> None:
    cases = _cases(product, name, world, many)
    first, *others = pool(world).run(_check, product, name, cases)
    for other in others:
        for case, one, same in zip(cases, first, other, strict=True):
            assert all(torch.equal(one[key], same[key]) for key in one), f"ranks differ: {case}"


@pytest.mark.parametrize("what", ["check_each_gradient_alone", "check_autocast", "check_without_gradients"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("product", PRODUCTS)
@on_ranks(2)
def test_gradients_obey_the_rules_of_autograd(product: str, name: Implementation, what: str) -> None:
    with use(implementation=name):
        getattr(PRODUCTS[product], what)(dist.group.WORLD)


@pytest.mark.parametrize("product", PRODUCTS)
def test_one_rank_without_a_group_has_a_product_of_its_own(product: str) -> None:
    inputs = {"x": normal(1, 4, 2, 6), "weight": normal(2, 8, 6), "bias": normal(3, 8)}
    if "residual" in PRODUCTS[product].held:
        inputs["residual"] = normal(4, 4, 2, 8)
    assert torch.equal(PRODUCTS[product].run(Case(), inputs, None), gemm(**inputs))


X, W, B = torch.ones(4, 3), torch.ones(6, 3), torch.ones(6)
ALL, ROWS, RESIDUAL = tuple(PRODUCTS), tuple(PRODUCTS)[:2], tuple(PRODUCTS)[1:]
# (the products that refuse it, the arguments that differ from good ones, the message)
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ALL, {"x": X.int()}, "x is torch.int32: expected a float dtype"),
    (ALL, {"x": torch.tensor(1.0)}, "x has shape (): expected [..., K]"),
    (ROWS[:1], {"x": X[0]}, "x has shape (3,): expected [n, ..., K]"),
    (ROWS[1:], {"x": X[0]}, "x has shape (3,): expected [world * n, ..., K]"),
    (ROWS[1:], {"x": torch.ones(5, 3)}, "5 rows cannot be split among 2 ranks"),
    (ALL, {"weight": torch.ones(3, 6)}, "weight has shape (3, 6): expected [N, 3]"),
    (ALL, {"bias": B[:5]}, "bias has shape (5,): expected (6,)"),
    (ALL, {"weight": W.double(), "bias": None}, "weight is torch.float64, x is torch.float32: expected one dtype"),
    (ALL, {"bias": B.double()}, "bias is torch.float64, x is torch.float32: expected one dtype"),
    (ALL, {"weight": W.to("meta")}, "weight is on meta, x on cpu: expected one device"),
    (ALL, {"bias": B.to("meta")}, "bias is on meta, x on cpu: expected one device"),
    (RESIDUAL[:1], {"residual": torch.ones(4, 6)}, "residual has shape (4, 6): expected (2, 6)"),
    (RESIDUAL[1:], {"residual": torch.ones(2, 6)}, "residual has shape (2, 6): expected (4, 6)"),
    (RESIDUAL[:1], {"residual": torch.ones(2, 6, device="meta")}, "residual is on meta, x on cpu"),
    (RESIDUAL[1:], {"residual": torch.ones(4, 6, device="meta")}, "residual is on meta, x on cpu"),
    (
        ROWS[:1],
        {"weight": W[:5], "bias": None, "activation": "geglu"},
        "weight has 5 rows: geglu expects an even number, [gate | up]",
    ),
    (ROWS[:1], {"weight": [], "bias": []}, "0 weights and 0 biases: expected at least one weight and as many biases"),
    (
        ROWS[:1],
        {"weight": [W, W], "bias": [B]},
        "2 weights and 1 biases: expected at least one weight and as many biases",
    ),
    (
        ROWS[:1],
        {"weight": [W, W], "bias": [B, B], "activation": "swiglu"},
        "swiglu expects one weight, [gate | up], not 2",
    ),
]


@pytest.mark.parametrize("product", PRODUCTS)
@on_ranks(2)
def test_bad_input_is_refused(product: str) -> None:
    for products, changes, message in REFUSED:
        if product in products:
            with naming(message), pytest.raises(ValueError, match=re.escape(f"{product}: {message}")):
                PRODUCTS[product].function(**{"x": X, "weight": W, "bias": B} | changes, group=dist.group.WORLD)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'tanh' is not known: expected None or one of gelu, gelu_tanh"):
        all_gather_linear(X, W, B, None, activation="tanh")
