"""RMSNorm on sequence shards: a replicated weight whose gradient is summed over the ranks."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import has_values
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.layers.local_parameter import local_of
from tpfuse.layers.on_mesh import OnMesh, check_kind, empty_parameter, last_dimension, take_
from tpfuse.ops.rms_norm import rms_norm


class RMSNorm(OnMesh, nn.RMSNorm):
    """nn.RMSNorm over the last dimension with its weight replicated over a one-dimensional mesh.

    eps: None for the machine epsilon of the dtype of the computation, float32 for the half types, as in torch.
    elementwise_affine: False for no weight. sequence_parallel and `sum_gradients`: as in `tpfuse.layers.layer_norm`.

    Raise ValueError for a normalized_shape of several dimensions.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        sequence_parallel: bool = False,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps = last_dimension(normalized_shape), eps
        self.elementwise_affine, self.device_mesh = elementwise_affine, device_mesh
        self.sum_gradients = sequence_parallel and self.group is not None
        shape = self.normalized_shape
        weight = empty_parameter(shape, None, device_mesh, device, dtype) if elementwise_affine else None
        self.register_parameter("weight", weight)
        if elementwise_affine and has_values(self.weight):
            self.reset_parameters()

    @classmethod
    def from_rms_norm(
        cls, norm: nn.RMSNorm, *, sequence_parallel: bool = False, device_mesh: DeviceMesh | None = None
    ) -> Self:
        """Return a layer with the weight of `norm`, equal on all ranks, on its device and dtype."""
        check_kind("norm", norm, nn.RMSNorm)
        layer = cls(
            norm.normalized_shape, norm.eps, norm.elementwise_affine, sequence_parallel=sequence_parallel,
            device_mesh=device_mesh, device="meta", dtype=None if norm.weight is None else norm.weight.dtype,
        )  # fmt: skip
        take_(layer, norm)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Return the RMS norm of input [..., C], in its shape."""
        weight = local_of(self, "weight")
        eps = torch.finfo(summed_dtype(input.dtype)).eps if self.eps is None else self.eps
        return rms_norm(input, weight, eps, sum_gradients_over=self.group if self.sum_gradients else None)
