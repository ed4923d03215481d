"""embedding: rows of a table that is sharded by rows over the ranks (vocabulary parallelism, arXiv:1909.08053)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm.layout import check_local
from tpfuse.comm.mesh import check_group, rank_and_size, shard_range
from tpfuse.ops.checks import check_range
from tpfuse.ops.collectives import all_reduce, reduce_scatter


def embedding(
    ids: Tensor,
    weight: Tensor,
    num_embeddings: int,
    group: dist.ProcessGroup | None,
    *,
    scatter: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return weight[ids], if each rank holds the rows of `shard_range(num_embeddings, rank, world)`.

    ids: [...] int64, equal on all ranks; weight: [rows of this rank, C]. The result is [..., C], equal on all ranks, or
    with `scatter` this rank's shard of it along dimension 0. padding_idx: a row of the table, counted from 0, that gets
    no gradient. Raise ValueError on CPUs for an id outside the table. On CUDA that check would stop the stream, and
    under torch.compile break the graph: there its row is NaN, or torch's own error if group is None.
    """
    check_group("embedding", group)
    check_local("embedding", ids=ids, weight=weight)
    check_range(
        ids, num_embeddings - 1, f"ids between {{low}} and {{high}} do not fit a table of {num_embeddings} rows"
    )
    if group is None:
        return F.embedding(ids, weight, padding_idx)
    start, stop = shard_range(num_embeddings, *rank_and_size(group))
    outside = (ids < 0) | (ids >= num_embeddings)  # of which no rank has the row
    owned = (ids >= start) & (ids < stop)
    if stop > start:
        padding = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
        rows = F.embedding(torch.where(owned, ids - start, 0), weight, padding)
        other = weight.new_zeros(ids.shape).masked_fill(outside, float("nan"))
        partial = torch.where(owned.unsqueeze(-1), rows, other.unsqueeze(-1))
    else:  # more ranks than rows: this rank has no row of the table, but the sum below needs every rank
        partial = weight.sum() + weight.new_zeros(*ids.shape, weight.shape[-1])
    return reduce_scatter(partial, group) if scatter else all_reduce(partial, group)
