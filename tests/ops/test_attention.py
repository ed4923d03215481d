import pytest
import torch

from tpfuse.kernels import reference
from tpfuse.ops.attention import causal_attention
from tpfuse.ops.dropout import dropout_key, keep_mask
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import normal

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _check(yardstick: Yardstick, leaves: dict[str, torch.Tensor], out: torch.Tensor, grad: torch.Tensor) -> None:
    out.backward(grad)
    yardstick.check("out", out)
    for name, leaf in leaves.items():
        yardstick.check(name, leaf.grad)


def _inputs(tq: int, tk: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"q": normal(1, 2, 3, tq, 20, dtype=dtype)} | {
        name: normal(seed, 2, 3, tk, 20, dtype=dtype) for name, seed in (("k", 2), ("v", 3))
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tq", "tk"), [(2, 2), (63, 63), (100, 100), (1, 100), (7, 63), (62, 63)])
def test_against_reference(tq: int, tk: int, dtype: torch.dtype) -> None:
    inputs, grad = _inputs(tq, tk, dtype), normal(4, 2, 3, tq, 20, dtype=dtype)
    yardstick = Yardstick(reference.causal_attention, inputs, grad)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    _check(yardstick, leaves, causal_attention(**leaves), grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tq", "tk"), [(63, 63), (1, 100), (7, 63)])
def test_dropout(tq: int, tk: int, dtype: torch.dtype) -> None:
    inputs, grad = _inputs(tq, tk, dtype), normal(4, 2, 3, tq, 20, dtype=dtype)
    key, head_rows = dropout_key(1, 2, 3), torch.tensor([[4, 5, 6], [10, 11, 12]])
    rows = head_rows.unsqueeze(-1) * tk + torch.arange(tk - tq, tk)
    mask = keep_mask(rows, tk, 0.3, key).to(dtype) / 0.7

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return reference.causal_attention(q, k, v, mask.to(q.dtype))

    yardstick = Yardstick(whole, inputs, grad)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = causal_attention(**leaves, dropout_p=0.3, head_rows=head_rows, key=key)
    _check(yardstick, leaves, out, grad)


def test_heads_and_sequences_are_dropped_alike_wherever_they_are() -> None:
    q, k, v = _inputs(63, 63, torch.float64).values()
    head_rows = torch.arange(6).view(2, 3)
    whole = causal_attention(q, k, v, dropout_p=0.5, head_rows=head_rows, key=7)
    for b in range(2):
        for h in range(3):
            part = (slice(b, b + 1), slice(h, h + 1))
            alone = causal_attention(q[part], k[part], v[part], dropout_p=0.5, head_rows=head_rows[part], key=7)
            torch.testing.assert_close(alone, whole[part], rtol=1e-12, atol=1e-12)


def test_one_position_sees_itself() -> None:
    q, k, v = _inputs(1, 1, torch.float32).values()
    assert torch.equal(causal_attention(q, k, v), v)


def test_the_future_is_not_seen() -> None:
    q, k, v = _inputs(63, 63, torch.float32).values()
    before = causal_attention(q, k, v)
    k[:, :, 40:], v[:, :, 40:] = 1e4, -1e4
    assert torch.equal(causal_attention(q, k, v)[:, :, :40], before[:, :, :40])


def test_bad_input_is_refused() -> None:
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="3 queries to 2 keys"):
        causal_attention(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="needs head_rows"):
        causal_attention(q, q, q, dropout_p=0.1)
