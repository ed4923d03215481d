"""ColumnParallelLinear: an nn.Linear whose output features are sharded over the ranks of a mesh.

Y = act(X Wᵀ + b) with W = [W_0; W_1; …]: rank r computes X W_rᵀ, a slice of Y's features (Megatron-LM,
arXiv:1909.08053). With sequence parallelism X arrives as a shard of the sequence and is gathered first
(arXiv:2205.05198).
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
from tpfuse.layers.sequence import (
    check_sequence_dim,
    gather_features,
    packed_bias,
    sequence_back,
    sequence_first,
    splits,
)
from tpfuse.ops.activation import GATED, check_activation
from tpfuse.ops.collectives import replicate
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear


class ColumnParallelLinear(OnMesh, nn.Linear):
    """Linear layer with the weight [out_features, in_features] sharded along dimension 0.

    in_features, out_features: of the whole layer; activation: a name of `tpfuse.ops.activation`, applied to the output
    (the gated ones require parts=2 and halve it). gather_output: return the whole output on every rank.
    sequence_parallel: the input is this rank's shard along `sequence_dim`. parts: the number of matrices of equal
    height that are packed in the weight (3 for q, k, v), each of them sharded by itself; the weight is then [parts,
    out_features / parts, in_features] with Shard(1), and the bias [out_features] is whole on every rank, which uses its
    slices; its gradient is summed over the mesh in backward unless an engine does it (`sum_gradients`, as in
    `tpfuse.layers.layer_norm`). A rank's output has its slices of all parts, concatenated. device_mesh: one-
    dimensional; None for one rank with plain parameters.

    Raise ValueError if the mesh does not divide a part's height or the activation is not known.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        parts: int = 1,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        check_activation(activation)
        if activation in GATED and parts != 2:
            raise ValueError(
                f"activation {activation!r} with parts={parts}: expected parts=2, gate and up packed in one weight"
            )
        if activation in GATED and gather_output:
            raise ValueError("gather_output is not defined for a gated activation: gather after the next layer")
        self.device_mesh = device_mesh
        world = rank_and_size(self.group)[1]
        if parts < 1:
            raise ValueError(f"parts {parts}: expected at least 1")
        height, remainder = divmod(out_features, parts)
        if remainder:
            raise ValueError(f"out_features {out_features} in {parts} part(s): expected a multiple of {parts}")
        if height % world:
            raise ValueError(
                f"out_features {out_features} in {parts} part(s) cannot be split among {world} ranks:"
                f" expected a multiple of {parts * world}, or tp {splits(height, max(world, 8))}"
                + ("; the head of a vocabulary of any size is VocabParallelEmbedding.project" if parts == 1 else "")
            )
        self.in_features, self.out_features, self.parts = in_features, out_features, parts
        self.activation, self.gather_output = activation, gather_output
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        rows, shard_dim = ((out_features,), 0) if parts == 1 else ((parts, height), 1)
        self.weight = empty_parameter((*rows, in_features), shard_dim, device_mesh, device, dtype)
        # One dimension of all parts has no shards that DTensor describes, and with two it would decay like a matrix.
        bias_dim = 0 if parts == 1 else None
        self.register_parameter(
            "bias", empty_parameter((out_features,), bias_dim, device_mesh, device, dtype) if bias else None
        )
        self.sum_gradients = bias and parts > 1 and self.group is not None
        if has_values(self.weight):
            self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        activation: str | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        parts: int = 1,
        device_mesh: DeviceMesh | None = None,
    ) -> Self:
        """Return a layer with this rank's rows of `linear`, which is whole on every rank, on its device and dtype.

        parts: the number of matrices that are concatenated in linear's weight; other arguments: as in the constructor.
        """
        check_kind("linear", linear, nn.Linear)
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None, activation=activation,
            gather_output=gather_output, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
            parts=parts, device_mesh=device_mesh, device="meta", dtype=linear.weight.dtype,
        )  # fmt: skip
        return take_(layer, linear)

    def reset_parameters(self) -> None:
        """Initialise the whole layer as nn.Linear does, and keep this rank's shard of it."""
        reset_linear_(self, self.device_mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., this rank's output features] of x [..., in_features], whole or (sequence_parallel) a shard."""
        if self.sequence_parallel and not -x.ndim <= self.sequence_dim < -1:
            check_sequence_dim(x, self.sequence_dim)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if isinstance(weight, DTensor) or isinstance(bias, DTensor):
            dims = (0, 0) if self.parts == 1 else (1, None)
            weight, bias = local_of(self, "weight", dims[0]), local_of(self, "bias", dims[1])
        if self.parts > 1:
            weight = weight.flatten(0, 1)
        group = None if self.device_mesh is None else self.group
        if group is None:
            return gemm(x, weight, bias, activation=self.activation)
        if self.parts > 1 and bias is not None:
            bias = packed_bias(bias, self.parts, group, group if self.sum_gradients else None)
        if self.sequence_parallel:
            mark_partial_gradients(self, x, "sequence")
            x = sequence_first(x, self.sequence_dim)
            out = all_gather_linear(x, weight, bias, group, activation=self.activation)
            out = sequence_back(out, self.sequence_dim)
        else:
            out = gemm(replicate(x, group), weight, bias, activation=self.activation)
        if self.gather_output:
            out = gather_features(out, self.out_features, self.parts, group)
        return out

    @property
    def operator(self) -> str:
        """Return the name of the operator of `tpfuse.ops` that forward calls."""
        return "all_gather_linear" if self.sequence_parallel and self.group is not None else "gemm"

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" activation={self.activation}, sequence_parallel={self.sequence_parallel}, parts={self.parts},"
            f" tp={rank_and_size(self.group)[1]}"
        )
