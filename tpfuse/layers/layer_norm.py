"""LayerNorm on sequence shards: replicated weights whose gradients are summed over the ranks."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpfuse.comm.layout import has_values
from tpfuse.layers.local_parameter import local_of
from tpfuse.layers.on_mesh import OnMesh, check_kind, empty_parameter, last_dimension, take_
from tpfuse.ops.layer_norm import layer_norm, layer_norm_and_input


class LayerNorm(OnMesh, nn.LayerNorm):
    """nn.LayerNorm over the last dimension with weight and bias replicated over a one-dimensional mesh.

    elementwise_affine: False for neither weight nor bias. sequence_parallel: each rank has other rows, so the gradients
    of weight and bias are summed over the mesh in backward. Setting `sum_gradients` to False turns that off, for an
    engine that sums the gradients of all layers at once (as `tpfuse.zero.gradient_buckets` does).

    Raise ValueError for a normalized_shape of several dimensions.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        elementwise_affine: bool = True,
        sequence_parallel: bool = False,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps = last_dimension(normalized_shape), eps
        self.elementwise_affine, self.device_mesh = elementwise_affine, device_mesh
        self.sum_gradients = sequence_parallel and self.group is not None
        for name, exists in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            parameter = empty_parameter(self.normalized_shape, None, device_mesh, device, dtype) if exists else None
            self.register_parameter(name, parameter)
        if elementwise_affine and has_values(self.weight):
            self.reset_parameters()

    @classmethod
    def from_layer_norm(
        cls, norm: nn.LayerNorm, *, sequence_parallel: bool = False, device_mesh: DeviceMesh | None = None
    ) -> Self:
        """Return a layer with the weight and bias of `norm`, equal on all ranks, on its device and dtype."""
        check_kind("norm", norm, nn.LayerNorm)
        layer = cls(
            norm.normalized_shape, norm.eps, norm.bias is not None, elementwise_affine=norm.elementwise_affine,
            sequence_parallel=sequence_parallel, device_mesh=device_mesh, device="meta",
            dtype=None if norm.weight is None else norm.weight.dtype,
        )  # fmt: skip
        take_(layer, norm)
        return layer

    def forward(self, input: Tensor, *, with_input: bool = False) -> Any:
        """Return the layer norm of input [..., C], in its shape; with_input: (layer norm, input).

        with_input: for a residual path, which continues with the input returned (`layer_norm_and_input`).
        """
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor) or isinstance(bias, DTensor):
            weight, bias = local_of(self, "weight"), local_of(self, "bias")
        function = layer_norm_and_input if with_input else layer_norm
        return function(input, weight, bias, self.eps, sum_gradients_over=self.group if self.sum_gradients else None)
