"""VocabParallelEmbedding: an nn.Embedding whose rows are spread over the ranks of a mesh."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import copy_whole_
from tpfuse.comm.mesh import group_of, rank_and_size
from tpfuse.layers.parameter import (
    check_sequence_dim,
    empty_parameter,
    local,
    sequence_back,
    sequence_first,
    shared_generator,
)
from tpfuse.ops.all_gather_linear import all_gather_linear
from tpfuse.ops.collectives import all_gather, gather_last, replicate
from tpfuse.ops.embedding import embedding
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy


class VocabParallelEmbedding(nn.Embedding):
    """Table [num_embeddings, embedding_dim] sharded along dimension 0, and the output projection tied to it.

    The mesh need not divide num_embeddings: the last ranks hold fewer rows (see `tpfuse.comm.mesh`), and no
    row exists that is not in the vocabulary. sequence_parallel: the output is this rank's shard along its dimension
    `sequence_dim`, whose length the mesh must divide, and `project` and `loss` take such a shard.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.sequence_parallel, self.sequence_dim, self.device_mesh = sequence_parallel, sequence_dim, device_mesh
        self.group = group_of(device_mesh)
        self.weight = empty_parameter((num_embeddings, embedding_dim), 0, device_mesh, device, dtype)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """nn.Embedding's initialisation of the whole table, of which each rank keeps its shard."""
        whole = torch.empty(self.num_embeddings, self.embedding_dim, device="cpu")
        copy_whole_(self.weight, whole.normal_(generator=shared_generator(self.device_mesh)))

    def forward(self, input: Tensor) -> Tensor:
        """input: [...] int64, equal on all ranks -> [..., embedding_dim], whole or (sequence_parallel) a shard."""
        if not self.sequence_parallel:
            return embedding(input, local(self.weight), self.num_embeddings, self.group, scatter=False)
        check_sequence_dim(input.unsqueeze(-1), self.sequence_dim)
        dim = self.sequence_dim % (input.ndim + 1)
        scatter = self.group is not None
        ids = sequence_first(input, dim)
        return sequence_back(embedding(ids, local(self.weight), self.num_embeddings, self.group, scatter=scatter), dim)

    def project(self, x: Tensor, *, gather_output: bool = False) -> Tensor:
        """Logits x wᵀ of all tokens: x [..., embedding_dim], whole or a shard -> [..., this rank's rows].

        gather_output: [..., num_embeddings] on every rank instead.
        """
        weight = local(self.weight)
        if self.sequence_parallel:
            check_sequence_dim(x, self.sequence_dim)
            logits = all_gather_linear(sequence_first(x, self.sequence_dim), weight, None, self.group)
            logits = sequence_back(logits, self.sequence_dim)
        else:
            logits = gemm(replicate(x, self.group), weight)
        if not gather_output or self.group is None:
            return logits
        widest = -(-self.num_embeddings // self.group.size())
        padded = F.pad(logits, (0, widest - logits.shape[-1]))
        return gather_last(padded, self.group)[..., : self.num_embeddings]

    def loss(self, x: Tensor, target: Tensor, weight: float) -> Tensor:
        """weight Σ cross_entropy(x wᵀ, target), float32 [], equal on all ranks; no rank ever holds all its logits.

        x: [..., embedding_dim], whole or a shard, as for `project`; target: [...] int64, all tokens', -1 where there is
        no loss.
        """
        if self.sequence_parallel:
            check_sequence_dim(x, self.sequence_dim)
            x = sequence_back(all_gather(sequence_first(x, self.sequence_dim), self.group), self.sequence_dim)
        else:
            x = replicate(x, self.group)
        x, target = x.flatten(0, -2), target.flatten()
        weights = x.new_full(x.shape[:1], weight, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        table = local(self.weight)
        return linear_cross_entropy(x, table, target, self.num_embeddings, self.group, weights=weights)[0]

    def extra_repr(self) -> str:
        """What print(layer) shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={rank_and_size(self.group)[1]}"
