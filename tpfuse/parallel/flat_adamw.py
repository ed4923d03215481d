"""AdamW on the flat buffers of the gradient buckets, by one pass over each (`tpfuse.ops.adamw`)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpfuse.ops.adamw import adamw_
from tpfuse.parallel.gradient_buckets import Bucket, GradientBuckets, Segment

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Shards:
    """Parts of the buckets' flat buffers; a parameter is None where the master is it."""

    masters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor | None] = field(default_factory=list)


class FlatAdamW:
    """AdamW with two shards for each bucket: what is decayed and what is not.

    betas, eps, weight_decay: as torch.optim.AdamW has them; the learning rate is given with each step.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._moments: dict[int, dict[str, Tensor]] = {}
        self._step = torch.zeros((), dtype=torch.float32, device=buckets.buckets[0].master.device)
        self._shards: dict[tuple[bool, torch.dtype], _Shards] = {}  # by whether they are decayed, and by dtype
        for bucket in buckets.buckets:
            whole = {name: torch.zeros_like(bucket.master) for name in MOMENTS}
            self._moments[id(bucket)] = whole
            flats = (bucket.master, bucket.gradients, whole["exp_avg"], whole["exp_avg_sq"], bucket.values)
            for parts in zip(*map(bucket.halves, flats), strict=True):
                shards = self._shards.setdefault((parts[0][0], bucket.master.dtype), _Shards())
                master, gradient, exp_avg, exp_avg_sq, parameter = (part for _, part in parts)
                shards.masters.append(master)
                shards.gradients.append(gradient)
                shards.exp_avgs.append(exp_avg)
                shards.exp_avg_sqs.append(exp_avg_sq)
                shards.parameters.append(None if bucket.master is bucket.values else parameter)

    def step(self, lr: float | Tensor) -> None:
        """One update of the masters with the buckets' gradients, and of the parameters from the masters."""
        self._step += 1
        beta1, beta2 = self._betas
        for (decay, _), shards in self._shards.items():
            adamw_(
                shards.masters,
                shards.gradients,
                shards.exp_avgs,
                shards.exp_avg_sqs,
                shards.parameters,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=self._eps,
                weight_decay=self._weight_decay if decay else 0.0,
                step=self._step,
            )

    def moment(self, bucket: Bucket, segment: Segment, name: str) -> Tensor:
        """A parameter's first or second moment, in its local shape."""
        return bucket.view(self._moments[id(bucket)][name], segment)

    @property
    def updates(self) -> int:
        """How many updates the moments have seen."""
        return int(self._step)

    @updates.setter
    def updates(self, count: int) -> None:
        self._step.fill_(count)
