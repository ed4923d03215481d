"""all_gather_gemm: of one rank alone for `tpfuse verify`, its copier included; launches of eight ranks."""

from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels.activations import ACTIVATIONS
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.endpoint import Endpoint


def launches(dtype: torch.dtype, world: int = 8) -> None:
    """On meta tensors: the last rank of `world`; every activation, thin and large, both layouts of the weight."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    slots, flags = (empty(world, dtype=torch.int64) for _ in range(2))
    state, abort, ready = (empty(words, dtype=torch.int32) for words in (2, 1, 8 * world))
    endpoint = Endpoint(world - 1, world, slots, 1 << 30, flags, 4096, state, abort, programs=108)

    def run(m: int, weight: Tensor, bias: Tensor | None = None, **options: Any) -> None:
        k = weight.shape[1]
        all_gather_gemm_forward(empty(m, k), weight, bias, empty(world, m, k), ready, endpoint, **options)

    m, n, k = 1024, 4096, 8192
    for activation in ACTIVATIONS:
        run(m, empty(n, k), empty(n), activation=activation, keep_preactivation=activation is not None, keep_own=True)
    for activation in ("gelu", "geglu"):
        run(16, empty(n, k), activation=activation)  # few rows
        run(m, empty(n, k + 1), activation=activation)  # rows that TMA cannot read
    run(m, empty(k, n).t())  # the gradient of a row-parallel layer's input
    run(m, empty(n, k), copied=True)
