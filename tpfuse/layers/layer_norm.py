"""LayerNorm on sequence shards: replicated weights whose gradients are summed over the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.mesh import group_of
from tpfuse.layers.parameter import empty_parameter, local
from tpfuse.ops.layer_norm import layer_norm


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension with weight and bias replicated over a one-dimensional mesh.

    sequence_parallel: each rank sees other rows, so the gradients of weight and bias are summed over the mesh
    in backward. `sum_gradients` turns that off where somebody else sums them, all layers' in one go
    (`tpfuse.parallel.gradient_buckets` does).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"normalized_shape {list(shape)}: expected the last dimension alone")
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, True
        self.group = group_of(device_mesh)
        self.sum_gradients = sequence_parallel and self.group is not None
        self.weight = empty_parameter(shape, None, device_mesh, device, dtype)
        self.register_parameter("bias", empty_parameter(shape, None, device_mesh, device, dtype) if bias else None)
        if not self.weight.is_meta:
            self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        bias = None if self.bias is None else local(self.bias)
        group = self.group if self.sum_gradients else None
        return layer_norm(input, local(self.weight), bias, self.eps, sum_gradients_over=group)
