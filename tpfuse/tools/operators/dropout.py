"""dropout: the same mask as the plain one."""

import functools

import torch
from torch import Tensor

from tpfuse.kernels.dropout import dropout_forward
from tpfuse.ops.dropout import dropout, keep_mask
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import Case, Operator

_P = 0.3


def _reference(x: Tensor, rows: Tensor, key: Tensor) -> Tensor:
    return x * (keep_mask(rows, x.shape[-1], _P, key) / (1.0 - _P)).to(x.dtype)


def _inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": normal(1, 63, 200, dtype=dtype), "rows": torch.arange(63) + 2**33, "key": torch.tensor(-(2**61) - 5)}


CASES = (Case("p 0.3", functools.partial(dropout, p=_P), _reference, _inputs),)


def launches(dtype: torch.dtype) -> None:
    """On meta tensors: the stream between the blocks of GPT-2."""
    x = torch.empty(8192, 768, dtype=dtype, device="meta")
    rows, key = (torch.empty(n, dtype=torch.int64, device="meta") for n in (8192, 1))
    dropout_forward(x, 0.1, rows, key)


OPERATOR = Operator("dropout", launches, CASES)
