"""dropout: the hash, masks of slices, keys, and both paths."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.ops.dropout import drawn_keys, dropout, dropout_key, dropout_keys, keep_mask
from tpfuse.switches import use
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import normal

KEY = torch.tensor(dropout_key(1, 2, 3))


def _splitmix64(counter: int, key: int) -> int:
    """Return the hash by the published algorithm, in unsigned arithmetic."""
    z = (counter * 0x9E3779B97F4A7C15 + key) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_hash_is_splitmix64(p: float) -> None:
    rows = torch.tensor([0, 1, 5, 2**40])
    expected = [
        [(_splitmix64(row * 63 + c, int(KEY)) + 2**63) % 2**64 >= round(p * 2**64) for c in range(63)]
        for row in rows.tolist()
    ]
    assert torch.equal(keep_mask(rows, 63, p, KEY), torch.tensor(expected))


def test_a_slice_has_the_mask_of_the_whole() -> None:
    whole = keep_mask(torch.arange(100), 63, 0.3, KEY)
    for start, stop in ((0, 25), (25, 26), (26, 100)):
        assert torch.equal(keep_mask(torch.arange(start, stop), 63, 0.3, KEY), whole[start:stop])
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_mask(order, 63, 0.3, KEY), whole[order])
    assert torch.equal(keep_mask(torch.arange(100).view(4, 25), 63, 0.3, KEY), whole.view(4, 25, 63))


def test_keys_differ_and_do_not_change_with_releases() -> None:
    keys = {dropout_key(seed, step, site) for seed in range(12) for step in range(12) for site in range(12)}
    assert len(keys) == 12**3 and all(-(2**63) <= key < 2**63 for key in keys)
    assert dropout_key(0, 0, 0) == -6762612006551763605  # runs must not change with a release
    assert dropout_keys(torch.empty(0), 3, 5, 4).tolist() == [dropout_key(3, 5, site) for site in range(4)]
    torch.library.opcheck(dropout_keys, (torch.empty(0), 3, 5, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_triton_has_the_same_mask_and_gradient(dtype: torch.dtype, p: float) -> None:
    rows = torch.tensor([[0, 5, 2**40], [7, 1, 2]])
    x = normal(3, 2, 3, 100, dtype=dtype)
    plain, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = dropout(plain, p, rows, KEY)
    with use(kernels="triton"):
        out = dropout(own, p, rows, KEY)
        assert torch.equal(dropout(x[0, 0], p, rows[0, 0], KEY), out[0, 0]), "one row, without a dimension of rows"
    truth = x.double() * keep_mask(rows, 100, p, KEY) / (1 - p)
    check_error("out", out, expected, truth, torch.finfo(dtype).eps * truth.abs().max().item())
    out.backward(x)
    expected.backward(x)
    check_error("x", own.grad, plain.grad, truth, torch.finfo(dtype).eps * truth.abs().max().item())


def test_the_operator_is_registered_correctly() -> None:
    x, rows = normal(1, 5, 16).requires_grad_(), torch.arange(5)
    torch.library.opcheck(torch.ops.tpfuse.dropout, (x, 0.3, rows, KEY))
    torch.library.opcheck(torch.ops.tpfuse.keep_mask, (rows, 16, 0.3, KEY, None))
    torch.library.opcheck(torch.ops.tpfuse.keep_mask, (rows, 16, 0.3, KEY, torch.arange(3)))


def _drawn(x: Tensor) -> Tensor:
    """Return x after two dropouts, with row numbers and keys that are made inside of the graph."""
    rows = torch.arange(x[..., 0].numel()).view(x.shape[:-1])
    return dropout(dropout(x, 0.2, rows, drawn_keys(x, 1)[0]), 0.3, rows, drawn_keys(x, 2)[1])


def _values(function: Any, *shape: int) -> list[Tensor]:
    x = torch.ones(*shape, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    out = function(x)
    out.sum().backward()
    return [out.detach(), x.grad, torch.get_rng_state()]


def test_a_graph_has_the_hash_and_the_draw_as_operators() -> None:
    """Inductor would fold the products of the hash without a width, and draw other keys."""
    kept: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        kept.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(_drawn, fullgraph=True, backend=backend)
    assert all(map(torch.equal, _values(compiled, 2, 3, 4), _values(_drawn, 2, 3, 4)))
    assert kept.count("tpfuse.keep_mask.default") == kept.count("tpfuse.drawn_keys.default") == 2
    assert not [name for name in kept if "rand" in name or "xor" in name]


@pytest.mark.compile
def test_inductor_draws_the_masks_of_eager_code() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_drawn, fullgraph=True)
    for shape in ((2, 3, 4), (2, 8, 48), (3, 5, 7), (1, 1, 1)):
        assert all(map(torch.equal, _values(compiled, *shape), _values(_drawn, *shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scaling_and_gradient(dtype: torch.dtype) -> None:
    x, rows = normal(1, 21, 63, dtype=dtype).requires_grad_(), torch.arange(21)
    mask = keep_mask(rows, 63, 0.25, KEY)
    out = dropout(x, 0.25, rows, KEY)
    scale = torch.tensor(1 / 0.75, dtype=torch.float64).to(dtype)
    assert torch.equal(out, torch.where(mask, x * scale, 0))
    out.backward(torch.ones_like(out))
    assert torch.equal(x.grad, torch.where(mask, scale, 0))


def test_p_zero_keeps_everything() -> None:
    x = normal(2, 3, 5)
    assert dropout(x, 0.0, torch.arange(3), KEY) is x
    assert keep_mask(torch.arange(100), 100, 0.0, KEY).all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_p_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= p < 1"):
        dropout(torch.zeros(2, 2), p, torch.arange(2), KEY)


@pytest.mark.parametrize("kind", ["torch", "triton"])
@pytest.mark.parametrize(
    ("rows", "key", "message"),
    [
        (torch.arange(3), KEY, r"rows has shape \(3,\): expected \(2, 3\)"),
        (torch.arange(6), KEY, r"rows has shape \(6,\): expected \(2, 3\)"),
        (torch.arange(6, dtype=torch.int32).view(2, 3), KEY, "rows is torch.int32: expected int64"),
        (torch.arange(6).view(2, 3), KEY.view(1), r"key has shape \(1,\): expected \(\)"),
        (torch.arange(6).view(2, 3), KEY.float(), "key is torch.float32: expected int64"),
    ],
)
def test_rows_and_keys_that_do_not_fit_are_refused(kind: str, rows: Tensor, key: Tensor, message: str) -> None:
    with use(kernels=kind), pytest.raises(ValueError, match=f"^dropout: {message}$"):
        dropout(torch.zeros(2, 3, 4), 0.5, rows, key)
