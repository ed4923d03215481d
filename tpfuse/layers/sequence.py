"""Activations of layers whose ranks share a sequence or the features: dimensions, slices, and whole features."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.ops.autograd import no_view
from tpfuse.ops.collectives import gather_last, replicate


def check_sequence_dim(x: Tensor, dim: int) -> None:
    """Raise ValueError unless dimension `dim` of x [..., features] can be that of a sequence."""
    if x.ndim < 2 or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"sequence_dim {dim}: the input has shape {tuple(x.shape)}: expected one of its dimensions but the last,"
            " along which sequence_parallel shards the tokens"
        )


def sequence_first(x: Tensor, dim: int) -> Tensor:
    """Return x with dimension `dim` moved to the front, or x itself if it is there."""
    return x if dim % x.ndim == 0 else x.movedim(dim, 0)


def sequence_back(x: Tensor, dim: int) -> Tensor:
    """Return x, whose memory nothing else refers to, with its first dimension moved to `dim`, as no view of another.

    It is the inverse of `sequence_first`. (FSDP lets nobody change in place what a layer returns as a view.)
    """
    return x if dim % x.ndim == 0 else no_view(x.movedim(0, dim))


def packed_bias(
    bias: Tensor, parts: int, group: dist.ProcessGroup | None, sum_over: dist.ProcessGroup | None
) -> Tensor:
    """Return this rank's slice of each part of a whole bias [parts * height], concatenated.

    sum_over: the group over which the bias's gradient is summed in backward; each rank computes that of its slices.
    """
    if group is None:
        return bias
    bias = replicate(bias, sum_over)
    return bias.view(parts, group.size(), -1)[:, group.rank()].flatten()


def splits(size: int, most: int) -> str:
    """Return, as text, the numbers of ranks up to `most` that divide `size` features."""
    return ", ".join(str(tp) for tp in range(1, most + 1) if size % tp == 0)


def gather_features(out: Tensor, size: int, parts: int, group: dist.ProcessGroup) -> Tensor:
    """Return all `size` features of which `out` [..., n] has this rank's, on every rank.

    parts: the matrices whose slices a rank's features are, concatenated; the ranks divide each. With one part the last
    ranks may have fewer features.
    """
    if parts == 1:
        widest = -(-size // group.size())
        return gather_last(F.pad(out, (0, widest - out.shape[-1])), group)[..., :size]
    out = gather_last(out, group)  # [.., rank, part, feature] -> [.., part, rank, feature]
    width = out.shape[-1] // (group.size() * parts)
    return out.reshape(*out.shape[:-1], group.size(), parts, width).transpose(-3, -2).flatten(-3)
