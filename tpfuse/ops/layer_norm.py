"""layer_norm: (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

On sequence shards each rank sees some of the rows, so the gradients of weight and bias are partial sums; with
a group they are summed over it in backward.
"""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.ops.collectives import replicate


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    sum_gradients_over: dist.ProcessGroup | None = None,
) -> Tensor:
    """x: [..., C]; weight, bias: [C]. Returns x's shape and dtype.

    sum_gradients_over: the group over which the rows are sharded, where weight and bias should receive the
    gradient of all rows; None where all rows are here or somebody else sums.
    """
    weight = replicate(weight, sum_gradients_over)
    if bias is not None:
        bias = replicate(bias, sum_gradients_over)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
