"""PositionEmbedding: learned embeddings of positions, on sequence shards."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import check_local, copy_whole_, has_values
from tpfuse.layers.local_parameter import local_of
from tpfuse.layers.on_mesh import OnMesh, check_embedding, check_kind, empty_parameter, shared_generator, take_
from tpfuse.ops.collectives import replicate


class PositionEmbedding(OnMesh, nn.Embedding):
    """Table [num_embeddings, embedding_dim] replicated over a one-dimensional mesh.

    sequence_parallel and `sum_gradients`: as in `tpfuse.layers.layer_norm`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sequence_parallel: bool = False,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.device_mesh = device_mesh
        self.sum_gradients = sequence_parallel and self.group is not None
        self.weight = empty_parameter((num_embeddings, embedding_dim), None, device_mesh, device, dtype)
        if has_values(self.weight):
            self.reset_parameters()

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, sequence_parallel: bool = False, device_mesh: DeviceMesh | None = None
    ) -> Self:
        """Return a layer with the table of `embedding`, equal on all ranks, on its device and dtype.

        Raise ValueError for an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse gradients.
        """
        check_kind("embedding", embedding, nn.Embedding)
        check_embedding("embedding", embedding)
        if embedding.padding_idx is not None:
            raise ValueError(f"embedding has padding_idx={embedding.padding_idx}: expected None for positions")
        layer = cls(
            embedding.num_embeddings, embedding.embedding_dim, sequence_parallel=sequence_parallel,
            device_mesh=device_mesh, device="meta", dtype=embedding.weight.dtype,
        )  # fmt: skip
        return take_(layer, embedding)

    def reset_parameters(self) -> None:
        """Initialise the table as nn.Embedding does, equally on all ranks."""
        whole = torch.empty(self.num_embeddings, self.embedding_dim, device="cpu")
        copy_whole_(self.weight, whole.normal_(generator=shared_generator(self.device_mesh)))

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings [..., embedding_dim] of `input` [...] int64, the positions of this rank's tokens."""
        check_local("position_embedding", input=input)
        weight = local_of(self, "weight")
        return F.embedding(input, replicate(weight, self.group if self.sum_gradients else None))
