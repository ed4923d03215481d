"""VocabParallelEmbedding: an nn.Embedding whose rows are sharded over the ranks of a mesh."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import copy_whole_, has_values
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.layers.local_parameter import head_of, local_of
from tpfuse.layers.on_mesh import OnMesh, check_embedding, check_kind, empty_parameter, shared_generator, take_
from tpfuse.layers.partial_gradients import mark_partial_gradients
from tpfuse.layers.sequence import check_sequence_dim, gather_features, sequence_back, sequence_first
from tpfuse.ops.collectives import all_gather, replicate
from tpfuse.ops.embedding import embedding
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy


class VocabParallelEmbedding(OnMesh, nn.Embedding):
    """Table [num_embeddings, embedding_dim] sharded along dimension 0, and the output projection tied to it.

    The mesh need not divide num_embeddings: the last ranks hold fewer rows (see `tpfuse.comm.mesh`), and the table has
    no padding rows. padding_idx: as in nn.Embedding, a row that is initialised to zero and gets no gradient from
    `forward`; negative numbers count from the end. sequence_parallel: the output is this rank's shard along its
    dimension `sequence_dim`, whose length the mesh must divide, and `project` and `loss` take such a shard.

    Raise ValueError for a padding_idx outside the table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx {padding_idx}: expected -{num_embeddings} to {num_embeddings - 1}, or None, for a table"
                f" of {num_embeddings} rows"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.sequence_parallel, self.sequence_dim, self.device_mesh = sequence_parallel, sequence_dim, device_mesh
        self.weight = empty_parameter((num_embeddings, embedding_dim), 0, device_mesh, device, dtype)
        if has_values(self.weight):
            self.reset_parameters()

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device_mesh: DeviceMesh | None = None,
    ) -> Self:
        """Return a layer with this rank's rows of `embedding`, which is whole on every rank, on its device and dtype.

        Raise ValueError for an embedding with max_norm, scale_grad_by_freq or sparse gradients: the layer has none.
        """
        check_kind("embedding", embedding, nn.Embedding)
        check_embedding("embedding", embedding)
        layer = cls(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, device_mesh=device_mesh, device="meta",
            dtype=embedding.weight.dtype,
        )  # fmt: skip
        return take_(layer, embedding)

    def reset_parameters(self) -> None:
        """Initialise the whole table as nn.Embedding does, and keep this rank's shard of it."""
        whole = torch.empty(self.num_embeddings, self.embedding_dim, device="cpu")
        whole.normal_(generator=shared_generator(self.device_mesh))
        if self.padding_idx is not None:
            whole[self.padding_idx] = 0
        copy_whole_(self.weight, whole)

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings [..., embedding_dim] of `input` [...] int64, which is equal on all ranks.

        The result is whole, or with sequence_parallel this rank's shard.
        """
        table = local_of(self, "weight", 0), self.num_embeddings, self.group
        if not self.sequence_parallel:
            return embedding(input, *table, scatter=False, padding_idx=self.padding_idx)
        check_sequence_dim(input.unsqueeze(-1), self.sequence_dim)
        dim = self.sequence_dim % (input.ndim + 1)
        scatter = self.group is not None
        ids = sequence_first(input, dim)
        return sequence_back(embedding(ids, *table, scatter=scatter, padding_idx=self.padding_idx), dim)

    def project(self, x: Tensor, *, gather_output: bool = False) -> Tensor:
        """Return the logits x wᵀ of all tokens, [..., this rank's rows], for x [..., embedding_dim], whole or a shard.

        gather_output: return [..., num_embeddings] on every rank instead.
        """
        weight, group = head_of(self), self.group
        if self.sequence_parallel:
            check_sequence_dim(x, self.sequence_dim)
            self._look(x)
            logits = all_gather_linear(sequence_first(x, self.sequence_dim), weight, None, group)
            logits = sequence_back(logits, self.sequence_dim)
        else:
            logits = gemm(replicate(x, group), weight)
        if not gather_output or group is None:
            return logits
        return gather_features(logits, self.num_embeddings, 1, group)

    def loss(self, x: Tensor, target: Tensor, weight: float) -> Tensor:
        """Return weight Σ cross_entropy(x wᵀ, target), float32 [], equal on all ranks.

        No rank holds all its logits at once. x: [..., embedding_dim], whole or a shard, as for `project`; target: [...]
        int64, those of all tokens, -1 or -100 for no loss.
        """
        group = self.group
        if self.sequence_parallel:
            check_sequence_dim(x, self.sequence_dim)
            self._look(x)
            x = sequence_back(all_gather(sequence_first(x, self.sequence_dim), group), self.sequence_dim)
        else:
            x = replicate(x, group)
        tokens = x.shape[:-1]
        if target.shape not in (tokens, (tokens.numel(),)):
            raise ValueError(f"loss: target has shape {tuple(target.shape)}: expected {tuple(tokens)}, as x has")
        x, target = x.reshape(-1, self.embedding_dim), target.flatten()
        weights = x.new_full(x.shape[:1], weight, dtype=summed_dtype(x.dtype))
        table = head_of(self)
        return linear_cross_entropy(x, table, target, self.num_embeddings, group, weights=weights)[0]

    def _look(self, x: Tensor) -> None:
        if self.group is not None:
            mark_partial_gradients(self, x, "sequence")

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, tp={rank_and_size(self.group)[1]}"
