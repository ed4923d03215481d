"""RowParallelLinear: an nn.Linear whose input features are sharded over the ranks of a mesh.

Y = Σ_r X_r W_rᵀ + b: rank r holds a slice of X's features and the columns of W that multiply them; the partial products
are summed over ranks (Megatron-LM, arXiv:1909.08053). Every rank gets the whole sum or, with sequence parallelism
(arXiv:2205.05198), its shard along the sequence.
"""

from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpfuse.comm.layout import has_values
from tpfuse.comm.mesh import rank_and_size
from tpfuse.layers.local_parameter import local_of
from tpfuse.layers.on_mesh import OnMesh, check_kind, empty_parameter, reset_linear_, take_
from tpfuse.layers.partial_gradients import mark_partial_gradients
from tpfuse.layers.sequence import check_sequence_dim, sequence_back, sequence_first, splits
from tpfuse.ops.collectives import split_last
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter


class RowParallelLinear(OnMesh, nn.Linear):
    """Linear layer with the weight [out_features, in_features] sharded along dimension 1, the bias replicated.

    in_features, out_features: of the whole layer. input_is_parallel: the input is this rank's slice of the features;
    otherwise it is whole, and the layer takes this rank's slice. sequence_parallel: the output is this rank's shard
    along `sequence_dim`, whose length the mesh must divide. device_mesh: one-dimensional; None for one rank with plain
    parameters.

    Raise ValueError if the mesh does not divide in_features, and for sequence_parallel without input_is_parallel.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.device_mesh = device_mesh
        world = rank_and_size(self.group)[1]
        if in_features % world:
            raise ValueError(
                f"in_features {in_features} cannot be split among {world} ranks: expected a multiple of {world},"
                f" or tp {splits(in_features, max(world, 8))}"
            )
        if sequence_parallel and not input_is_parallel:
            raise ValueError("sequence_parallel needs input_is_parallel: the input is whole along the sequence")
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.weight = empty_parameter((out_features, in_features), 1, device_mesh, device, dtype)
        self.register_parameter(
            "bias", empty_parameter((out_features,), None, device_mesh, device, dtype) if bias else None
        )
        if has_values(self.weight):
            self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device_mesh: DeviceMesh | None = None,
    ) -> Self:
        """Return a layer with this rank's columns of `linear`, whole on every rank, on its device and dtype."""
        check_kind("linear", linear, nn.Linear)
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None, input_is_parallel=input_is_parallel,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, device_mesh=device_mesh,
            device="meta", dtype=linear.weight.dtype,
        )  # fmt: skip
        return take_(layer, linear)

    def reset_parameters(self) -> None:
        """Initialise the whole layer as nn.Linear does, and keep this rank's shard of it."""
        reset_linear_(self, self.device_mesh)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [..., out_features], whole or a shard of the sequence, of x [..., this rank's input features].

        residual: of the output's shape, added to it (in the last pass of the product, if that is a Triton kernel).
        """
        if self.sequence_parallel and not -x.ndim <= self.sequence_dim < -1:
            check_sequence_dim(x, self.sequence_dim)
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor) or isinstance(bias, DTensor):
            weight, bias = local_of(self, "weight", 1), local_of(self, "bias")
        group = None if self.device_mesh is None else self.group
        if group is None:
            return gemm(x, weight, bias, residual=residual)
        if self.input_is_parallel:
            mark_partial_gradients(self, x, "features")
        else:
            x = split_last(x, group)
        if self.sequence_parallel:
            mark_partial_gradients(self, residual, "sequence")
            if residual is not None and residual.ndim == x.ndim:  # the operator refuses another
                residual = sequence_first(residual, self.sequence_dim)
            x = sequence_first(x, self.sequence_dim)
            out = linear_reduce_scatter(x, weight, bias, group, residual=residual)
            return sequence_back(out, self.sequence_dim)
        return linear_all_reduce(x, weight, bias, group, residual=residual)

    @property
    def operator(self) -> str:
        """Return the name of the operator of `tpfuse.ops` that forward calls."""
        if self.group is None:
            return "gemm"
        return "linear_reduce_scatter" if self.sequence_parallel else "linear_all_reduce"

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" sequence_parallel={self.sequence_parallel}, tp={rank_and_size(self.group)[1]}"
        )
