"""AdamW on the flat buffers of the gradient buckets, and the learning rate's schedule."""

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from tpfuse.parallel.gradient_buckets import Bucket, GradientBuckets, Segment
from tpfuse.train.options import OptimOptions

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(options: OptimOptions, step: int, steps: int) -> float:
    """Of optimizer step `step` (from 0): linear warm-up, then a cosine from lr to min_lr at decay_steps."""
    end = options.decay_steps or steps
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    if step >= end:
        return options.min_lr
    progress = (step - options.warmup) / max(1, end - options.warmup)
    return options.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (options.lr - options.min_lr)


class FlatAdamW:
    """torch's fused AdamW with two tensors for each bucket: what is decayed and what is not."""

    def __init__(self, buckets: GradientBuckets, options: OptimOptions) -> None:
        self._buckets = buckets
        self._moments: dict[int, dict[str, Tensor]] = {}
        self._steps: list[Tensor] = []
        groups: dict[bool, list[Parameter]] = {True: [], False: []}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for bucket in buckets.buckets:
            whole = {name: torch.zeros_like(bucket.master) for name in MOMENTS}
            self._moments[id(bucket)] = whole
            parts = zip(bucket.halves(bucket.master), bucket.halves(bucket.gradients), strict=True)
            cuts = {name: [part for _, part in bucket.halves(flat)] for name, flat in whole.items()}
            for index, ((decay, values), (_, gradients)) in enumerate(parts):
                parameter = Parameter(values)
                parameter.grad = gradients
                step = torch.zeros((), dtype=torch.float32, device=values.device)
                state[parameter] = {"step": step, **{name: cut[index] for name, cut in cuts.items()}}
                self._steps.append(step)
                groups[decay].append(parameter)
        self._optimizer = torch.optim.AdamW(
            [{"params": p, "weight_decay": options.weight_decay if d else 0.0} for d, p in groups.items() if p],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            fused=True,
        )
        self._optimizer.state.update(state)

    def step(self, lr: float) -> None:
        """One update of the masters with the buckets' gradients; the parameters follow."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._buckets.publish()

    def moment(self, bucket: Bucket, segment: Segment, name: str) -> Tensor:
        """A parameter's first or second moment, in its local shape."""
        return bucket.view(self._moments[id(bucket)][name], segment)

    @property
    def updates(self) -> int:
        """How many updates the moments have seen."""
        return int(self._steps[0])

    @updates.setter
    def updates(self, count: int) -> None:
        for counter in self._steps:
            counter.fill_(count)
