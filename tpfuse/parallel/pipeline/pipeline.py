"""Pipelines for models of your own whose blocks are a list; docs/pipeline.md has a program.

Every rank builds the whole model. The pipeline then frees what belongs to the stages of other ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import broadcast_, set_timeout
from tpfuse.comm.layout import has_values, local_tensor, model_device
from tpfuse.comm.member_groups import subgroup
from tpfuse.comm.mesh import check_order, group_of, rank_and_size
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.parallel.pipeline.order import PipelineSchedule, order, stage_ranks, usual_stages
from tpfuse.parallel.pipeline.parts import Part, Parts, as_modules
from tpfuse.parallel.pipeline.plan import PipelinePlan
from tpfuse.parallel.pipeline.runner import GradientEngine, Runner
from tpfuse.parallel.pipeline.timeline import predicted

MicroBatch = tuple[Tensor, ...]
Function = Callable[..., Tensor]
End = Function | tuple[Function, Iterable[Part]]  # a module, or a function with the modules and parameters that it uses


class Pipeline:
    """The stages of this rank of a pipeline through `model`.

    embed: returns the input x of the first block for the tensors of a micro-batch. blocks: modules of the model, in
    their order; each takes x and returns a tensor of the same shape and dtype. head: returns a scalar loss for the last
    block's output and the tensors of the micro-batch. embed and head are each a module of the model, or a pair
    (function, the modules and parameters of the model that it uses), or a function that uses none; what both use is
    tied. device_mesh: the one-dimensional mesh of the pipeline's ranks; None for one rank. schedule, stages_per_rank,
    micro_batches: as for `tpfuse.parallel.pipeline.order.order`; by default there are 2 stages on each rank for
    interleaved_1f1b and zbv, and 1 for the others. layers: the number of blocks of each stage; by default the blocks
    are cut so that all ranks have about equally many parameters, without tables of nn.Embedding in `embed`.

    On each rank, modules of other stages become nn.Identity, so that all other parameters keep their names. A tied
    parameter stays on the ranks of the first and the last stage, under one name, and begins there with the values that
    it has on the rank of the first stage. Make optimizers, engines and lists of model.parameters() after the pipeline.

    order: the order of a step. stages: the stages of this rank. blocks: the blocks of this rank. shared: the trained
    parameters that several stages use, for `tpfuse.zero.shard`.

    Raise ValueError for a mesh that is not one-dimensional or not in ascending order, a schedule that does not accept
    the numbers of stages or micro-batches, fewer blocks than stages, parts that are not in the model, a trained
    parameter that is in no part, and one that is shared by other stages than the first and the last.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        embed: End,
        blocks: Iterable[nn.Module],
        head: End,
        device_mesh: DeviceMesh | None,
        schedule: PipelineSchedule = "1f1b",
        micro_batches: int,
        stages_per_rank: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        group = group_of(device_mesh)
        check_order(device_mesh)
        rank, ranks = rank_and_size(group)
        count = usual_stages(schedule) if stages_per_rank is None else stages_per_rank
        rank_of = stage_ranks(schedule, ranks, count)
        self.order = order(schedule, ranks, count, micro_batches)
        (self._embed, embedding), (self._head, heads) = _used_by("embed", embed), _used_by("head", head)
        parts = Parts(model, blocks, embedding, heads)
        stages = parts.cut(rank_of, layers)
        self._all_stages, self._costs = stages, parts.costs(stages)
        parts.check_sharing(stages, rank_of)
        self.model, self._group = model, group
        self.stages = [stages[index] for index in self.order.stages_of(rank)]
        shared = parts.shared() if rank_of[0] != rank_of[-1] else []
        trained = [name for name in shared if model.get_parameter(name).requires_grad]
        self._ends = _group_of_ends(group, rank_of[-1]) if shared else None
        parts.keep(self.stages)
        self._blocks, self.blocks = parts.blocks, [parts.blocks[i] for stage in self.stages for i in stage.layers]
        if group is not None:
            set_timeout(group)
        if self._ends is not None:
            for x in (local_tensor(model.get_parameter(name)) for name in shared):
                if has_values(x):  # on the meta device there is nothing to replace
                    sent = x.contiguous()
                    broadcast_([sent], self._ends)
                    x.copy_(sent)
        modules = {stage.index: as_modules(parts.of(stage)) for stage in self.stages}
        self._stage_of = {stage.index: stage for stage in self.stages}
        self._runner = Runner(self.order, self._compute, modules, group, model_device(model))
        self.shared = self._runner.shared_parameters(model, trained)

    @property
    def has_last(self) -> bool:
        """Return whether this rank has the last stage, which computes the losses."""
        return self._runner.has_last

    def step(self, batches: Sequence[MicroBatch], engine: GradientEngine | None = None) -> list[Tensor]:
        """Run the forward and backward passes of a step; return the losses on the rank of the last stage, [] elsewhere.

        batches: the micro-batches, which are tuples of tensors, equal on all ranks of the pipeline and of equal shapes
        and dtypes. Gradients are added to `.grad`; those of tied parameters are summed over both ends. engine:
        that of `tpfuse.zero.shard`, which then takes all gradients; `step` may be called once before an update.
        Raise ValueError for another number of micro-batches than the pipeline has, for micro-batches of other types or
        shapes, where gradients are disabled, and on the rank concerned for what a block or function returns that cannot
        be trained: another shape, no tensor, a constant loss. Raise RankFailed on the others if the first stage fails
        on its first micro-batch of a shape, and PeerTimeout if a rank is missing.
        """
        self._check(batches)
        if not torch.is_grad_enabled():
            raise ValueError(
                "step() where gradients are disabled, as under torch.no_grad(): forward() is for evaluation"
            )
        if engine is not None:
            engine.start(last=True, backwards=len(batches), again=True)
            return self._runner.train(batches, engine)
        tied = [self.model.get_parameter(name) for name in self.shared.tied]
        earlier = [parameter.grad for parameter in tied]  # of steps since zero_grad(), summed over both ends already
        for parameter in tied:
            parameter.grad = None
        losses = self._runner.train(batches)
        for parameter, gradient in zip(tied, earlier, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = local_tensor(parameter.grad)
            local.copy_(collectives.all_reduce(local.contiguous(), self._ends))
            if gradient is not None:
                parameter.grad += gradient
        return losses

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return what `head` returns for each micro-batch on the rank of the last stage, [] elsewhere; no gradients.

        batches: as for `step`, or one micro-batch. The results may have any shapes. Raise as `step` does.
        """
        self._check(batches)
        return self._runner.forward(batches)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients in `.grad` so that their 2-norm over all stages is at most max_norm; return the norm.

        The norm, float64 [], is that before scaling, the same on all ranks. Tied parameters count once. With an engine,
        use `ZeroOptimizer.clip_grad_norm_` instead.
        """
        counted_elsewhere = set(self.shared.tied) if not any(stage.first for stage in self.stages) else set()
        found = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        gradients = [gradient for name, gradient in found if name not in counted_elsewhere]
        squared = torch.zeros((), dtype=torch.float64, device=self._runner.device)
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        if sharded:
            norm = get_total_norm(sharded)
            squared += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
        squared += get_total_norm(g for g in gradients if not isinstance(g, DTensor)).double().square()
        norm = collectives.all_reduce(squared, self._group).sqrt()
        for _, gradient in found:
            local_tensor(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def plan(self) -> PipelinePlan:
        """Return the stages of all ranks with their costs, and what carries messages and why. Collective.

        Before the first step, what carries messages is what tensors of the dtype of this rank's first parameter take.
        Raise ValueError as `tpfuse.comm.dispatch.choose_implementation` does.
        """
        dtype = next((parameter.dtype for parameter in self.model.parameters()), torch.get_default_dtype())
        return self._runner.plan(self._all_stages, self._costs, dtype, predicted(self._runner.order, self._costs))

    def explanation(self) -> list[str]:
        """Return the lines that `tpfuse.explain` prints of the pipeline. Collective, and raises as `plan` does."""
        return self.plan().explanation()

    def _check(self, batches: Any) -> None:
        """Raise ValueError unless the micro-batches are a list of tuples of tensors of equal shapes and dtypes."""
        if not isinstance(batches, Sequence):
            raise ValueError(f"the micro-batches are a {type(batches).__name__}: expected a list of tuples of tensors")
        first: list[str] = []
        for index, batch in enumerate(batches):
            if not isinstance(batch, tuple):
                raise ValueError(f"micro-batch {index} is a {type(batch).__name__}: expected a tuple of tensors")
            for place, x in enumerate(batch):
                if not isinstance(x, Tensor):
                    raise ValueError(f"element {place} of micro-batch {index} is {_described(x)}: expected a tensor")
            shapes = [_described(x) for x in batch]
            first = first or shapes
            if shapes != first:
                raise ValueError(
                    f"micro-batch {index} has tensors {', '.join(shapes)}: expected {', '.join(first)}, as in the first"
                    " one"
                )

    def _compute(self, index: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run a stage as the forward pass of the model, whose hooks run around it; `fully_shard` needs them."""
        own = {"forward": self.model.__dict__["forward"]} if "forward" in self.model.__dict__ else {}
        self.model.__dict__["forward"] = self._forward
        try:
            return self.model(self._stage_of[index], x, batch)  # type: ignore[no-any-return]
        finally:
            del self.model.__dict__["forward"]
            self.model.__dict__.update(own)

    def _forward(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if x is None:
            x = self._embed(*batch)
            if not isinstance(x, Tensor):
                raise ValueError(f"`embed` returns {_described(x)}: expected a tensor, the input of the first block")
        elif x.requires_grad:
            x = _NoLeaf.apply(x)  # type: ignore[no-untyped-call]
        for number in stage.layers:
            y = self._blocks[number](x)
            if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
                raise ValueError(f"block {number} returns {_described(y)} for {_described(x)}: expected the same")
            x = y
        if not stage.last:
            return x
        x = self._head(x, *batch)
        if torch.is_grad_enabled():
            if not isinstance(x, Tensor) or x.ndim:
                raise ValueError(f"`head` returns {_described(x)}: expected a scalar loss, of shape []")
            if not x.requires_grad:
                raise ValueError("`head` returns a constant loss: expected one that depends on trained parameters")
        return x


class _NoLeaf(torch.autograd.Function):
    """The identity. The result has its input's memory, but is no leaf, so that a block may write to it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _used_by(name: str, end: Any) -> tuple[Function, list[Part]]:
    """Return a function of a pipeline's user and what it uses. Raise ValueError for another value."""
    if callable(end):
        return end, [end] if isinstance(end, nn.Module) else []
    if not isinstance(end, tuple) or len(end) != 2 or not callable(end[0]) or callable(end[1]):
        raise ValueError(
            f"{name} is a {type(end).__name__}: expected a module of the model, or (function, [modules that it uses])"
        )
    return end[0], list(end[1])


def _group_of_ends(group: dist.ProcessGroup | None, last: int) -> dist.ProcessGroup | None:
    """Return the group of two ranks, a pipeline's first one and rank `last`; None on others. Collective."""
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 2:
        return group
    return subgroup([ranks[0], ranks[last]], group, "group of both ends of a pipeline")


def _described(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
