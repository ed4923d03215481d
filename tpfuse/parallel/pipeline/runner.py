"""Runs the stages of one rank of a pipeline, in the order of `tpfuse.parallel.pipeline.order`.

A stage receives its input from the previous stage, computes, and sends its output to the next one; in backward it is
the other way round. Messages to a stage on another rank go through `tpfuse.comm.messages`, where a wait has a deadline
and an error names the rank that is missing. A stage on the same rank takes the tensor as it is.

A received tensor stays in its slot until the stage's backward pass for the micro-batch is complete: autograd keeps it
there, without a copy.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter, time
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.checkpoint import GraphExecGroup

from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.channel import slot_size
from tpfuse.comm.collectives.one_model import compare_inputs
from tpfuse.comm.dispatch import Choice, choose_implementation
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.messages import Message, Messages, Route, open_messages, reason_of
from tpfuse.comm.trace import span
from tpfuse.parallel.pipeline.cut import Cost, Stage
from tpfuse.parallel.pipeline.order import Action, Kind, Order
from tpfuse.parallel.pipeline.plan import PipelinePlan
from tpfuse.parallel.pipeline.shared_parameters import SharedParameters
from tpfuse.parallel.pipeline.timeline import Interval, Timeline, slots, timeline

Compute = Callable[[int, Tensor | None, Any], Tensor]


_Taken = tuple[Tensor, tuple[int, Message] | None]  # what another stage has sent, and its route and message to release


class GradientEngine(Protocol):
    """The part of the engines of `tpfuse.zero.shard` that a pipeline uses. They take the gradients of its stages."""

    def start(self, *, last: bool, backwards: int = 1, again: bool = False) -> None:
        """Begin a step with this number of backward passes, even if `ZeroOptimizer.zero_grad()` has begun it."""

    def backward_pass(
        self,
        parameters: set[nn.Parameter],
        complete: set[nn.Parameter],
        *,
        split: bool,
        micro_batch: int,
        last_stage: bool,
    ) -> AbstractContextManager[None]:
        """Mark, around it, a pass that computes gradients of these parameters (`tpfuse.zero.engine.Engine`)."""


@dataclass
class _Flight:
    """The tensors that a stage keeps of a micro-batch between its forward pass and the end of its backward pass."""

    x: Tensor | None  # the input, a leaf; None on the first stage
    output: Tensor | GradientEdge | None  # where the backward pass begins; None if the output needs no gradient
    taken: list[tuple[int, Message]]  # the messages that are released at the end
    gradient: Tensor | None = None  # the gradient of the output; None on the last stage
    weights: Sequence[Tensor] = ()  # the leaves whose gradients the second part of a split backward pass computes
    groups: Any = None  # what torch keeps between the two parts


def backward_weights(weights: Sequence[Tensor], groups: list[dict[str, Any]]) -> None:
    """Add to the gradients of weights what the groups give, which torch's `stage_backward_input` has returned.

    The caller has held the edge of the output since before that call: torch 2.11 forgets the node of an
    autograd.Function that nothing else holds. The function is ours because torch's `stage_backward_weight` gives wrong
    gradients in versions before 2.13. 2.11 adds up the gradients of a node's outputs; 2.11 and 2.12 count a node twice
    if one of the same group is computed from it.
    """
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights}
    nodes = [node for group in groups for node in group["intermediates"]]
    if len(set(nodes)) < len(nodes) or any(_in_series(group["intermediates"]) for group in groups):
        # torch keeps two groups apart that a weight used by both of them joins, and that weight is in both. And the
        # pass of a weight that two layers in series use runs through the layers in between, and frees what these saved.
        gradients, joined = ([each for group in groups for each in group[key]] for key in ("grads", "params"))
        groups = [{"intermediates": nodes, "grads": gradients, "params": set(joined)}]
    for group in groups:
        # the nodes that the weights share with the input, and the gradients of their outputs
        outputs_of = dict(zip(group.pop("intermediates"), group.pop("grads"), strict=True))
        accumulators = list(group["params"])
        known = [
            (GradientEdge(node, index), gradient)
            for node, outputs in outputs_of.items()
            for index, gradient in enumerate(outputs)
            if gradient is not None
        ]
        if not known:
            continue
        with ExitStack() as hooks:
            for node, outputs in outputs_of.items() if len(outputs_of) > 1 else ():
                # The gradients are complete: what arrives from other nodes of the group is part of them.
                hooks.callback(node.register_prehook(lambda _, outputs=outputs: outputs).remove)
            edges, starts = zip(*known, strict=True)
            ends = [GradientEdge(node, 0) for node in accumulators]
            found: Sequence[Tensor | None] = torch.autograd.grad(edges, ends, starts, allow_unused=True)
        taken = set(map(_memory_of, starts))
        for node, gradient in zip(accumulators, found, strict=True):
            weight = weight_of[node]
            if gradient is None:  # an autograd.Function has returned None for the weight
                continue
            if weight.grad is not None:
                weight.grad.add_(gradient)
                continue
            # The terms of a sum have one gradient, and so have its elements, but later micro-batches are added to each.
            shared = _memory_of(gradient) in taken or (gradient.layout is torch.strided and 0 in gradient.stride())
            weight.grad = gradient.clone() if shared else gradient
            taken.add(_memory_of(gradient))


def _in_series(nodes: Collection[Node]) -> bool:
    """Return whether a backward pass that begins at one of the nodes comes to another of them."""
    seen = set[Node]()
    left = [following for node in nodes for following, _ in node.next_functions] if len(nodes) > 1 else []
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node in nodes:
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


class Runner:
    """The stages of this rank of a pipeline.

    compute: returns the output of a stage, given its number, its input (None for the first stage) and the micro-batch.
    The output of the last stage is a scalar loss; those of all others have one shape and dtype. modules: the modules of
    each stage of this rank, whose parameters are trained. group: the ranks of the pipeline; None for one rank.
    """

    def __init__(
        self,
        order: Order,
        compute: Compute,
        modules: Mapping[int, Sequence[nn.Module]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.order, self.group, self.device = order, group, device
        self.rank = 0 if group is None else group.rank()
        self.stages = order.stages_of(self.rank)
        self._last_passes = order.last_passes(self.rank)
        self.began = 0.0  # when the last training step began on this rank, in seconds of the host's clock
        self.intervals: list[Interval] = []  # of the last training step, in seconds from its beginning
        self.most_in_flight = 0  # in the last training step, counted as by `timeline.most_in_flight`
        self._compute, self._modules = compute, modules
        self._routes, self._forward_routes, self._backward_routes = routes(order)
        self._opened: dict[tuple[int, torch.dtype], tuple[Messages, Choice]] = {}
        self._messages: Messages
        self._choice: Choice | None = None  # by which the messages of the last step were opened
        self._key: tuple[object, ...] = ()  # of the micro-batches that are computed now
        self._shape: tuple[torch.Size, torch.dtype]
        self._shapes: dict[tuple[object, ...], tuple[torch.Size, torch.dtype]] = {}
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._handed: dict[tuple[int, int, int], Tensor] = {}  # from a stage to another one on this rank

    @property
    def has_last(self) -> bool:
        """Return whether this rank has the last stage, which computes the loss."""
        return self.order.stages - 1 in self.stages

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage of this rank that require gradients."""
        found = (p for module in self._modules[stage] for p in module.parameters() if p.requires_grad)
        return list(dict.fromkeys(found))

    def shared_parameters(self, model: nn.Module, tied: Sequence[str]) -> SharedParameters:
        """Return the parameters of this rank that several stages use.

        model: has the stages of this rank. tied: on all ranks alike, the names of the parameters that the first and the
        last stage share.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        counts = Counter(names[parameter] for stage in self.stages for parameter in self.parameters(stage))
        ends = self.order.rank_of[0], self.order.rank_of[-1]
        return SharedParameters(
            uses={name: count for name, count in counts.items() if count > 1},
            tied=tied if ends[0] != ends[1] and self.rank in ends else (),
            ends=ends if ends[0] != ends[1] and tied else None,
        )

    def plan(
        self, stages: Sequence[Stage], costs: Sequence[Cost], dtype: torch.dtype, predicted: Timeline
    ) -> PipelinePlan:
        """Return the plan of the pipeline, with what carried messages last, or would carry those of `dtype`, and why.

        stages, costs: of all ranks. predicted: as for `PipelinePlan`. Collective. Raise ValueError as
        `tpfuse.comm.dispatch.choose_implementation` does.
        """
        implementation, reason = "local", "one rank"
        if self.group is not None:
            choice = self._choice or choose_implementation(self.device, dtype, self.group)
            implementation, reason = choice.implementation, reason_of(choice)
        return PipelinePlan(self.order, tuple(stages), tuple(costs), implementation, reason, predicted)

    def train(self, batches: Sequence[Any], engine: GradientEngine | None = None) -> list[Tensor]:
        """Run forward and backward passes for the micro-batches; return their losses on the rank of the last stage.

        Gradients are accumulated as by `backward`. Hooks of torch's register_post_accumulate_grad_hook run once for
        each parameter, stage and micro-batch, even if the backward pass is split. engine: takes the gradients, and has
        begun a step. Raise ValueError for another number of micro-batches than the order has, and on every rank if
        ranks pass different ones. Raise RankFailed if the first stage fails before ranks know the shape of messages:
        then none is left. Raise PeerTimeout if a rank is missing.
        """
        if len(batches) != self.order.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches: expected {self.order.micro_batches}")
        losses: list[Tensor] = []
        self.intervals, self.most_in_flight = [], 0
        try:
            self._open(batches, compares=True)
            self.began, began = time(), perf_counter()
            for action in self.order.actions[self.rank]:
                taken = self._take(action)
                start = perf_counter()
                name = f"micro-batch {action.micro_batch}, stage {action.stage}"
                with span("micro_batch", name), span("phase", action.kind.value), self._backward_pass(action, engine):
                    losses += self._run(action, batches[action.micro_batch], taken)
                self.intervals.append(Interval(action, start - began, perf_counter() - began))
            self._finish()
        finally:
            self._flights.clear()
            self._handed.clear()
        return losses

    @torch.no_grad()
    def forward(self, batches: Sequence[Any]) -> list[Tensor]:
        """Run forward passes; return the outputs of the last stage on its rank, in the order of the micro-batches.

        batches: as many as the order has, or one. Raise as `train` does, but ranks compare only the first micro-batches
        of a shape: in later calls a rank does not wait until the others have come.
        """
        if len(batches) not in (1, self.order.micro_batches):
            raise ValueError(f"{len(batches)} micro-batches: expected 1 or {self.order.micro_batches}")
        outputs: dict[int, Tensor] = {}
        try:
            self._open(batches, compares=False)
            for action in self.order.actions[self.rank]:
                if action.kind is not Kind.FORWARD or action.micro_batch >= len(batches):
                    continue
                taken = self._take(action)
                with self._first_pass():
                    y = self._compute(action.stage, None if taken is None else taken[0], batches[action.micro_batch])
                if action.stage == self.order.stages - 1:
                    outputs[action.micro_batch] = tree_map(partial(_outside, taken), y)
                else:
                    self._give(action, y, taken)
                if taken is not None and taken[1] is not None:
                    self._messages.release(*taken[1])
            self._finish()
        finally:
            self._handed.clear()
        return [outputs[number] for number in sorted(outputs)]

    def _backward_pass(self, action: Action, engine: GradientEngine | None) -> AbstractContextManager[None]:
        """Mark an action that computes gradients of a stage's weights.

        After the last one of a stage those of its parameters are complete that no stage with later ones has.
        """
        if engine is None or not action.ends:
            return nullcontext()
        parameters, complete = set(self.parameters(action.stage)), set[nn.Parameter]()
        if action in self._last_passes:
            later = self._last_passes[self._last_passes.index(action) + 1 :]
            complete = parameters.difference(*(self.parameters(each.stage) for each in later))
        split = action.kind is Kind.WEIGHT and self._flights[action.stage, action.micro_batch].groups is not None
        last_stage = action.stage == self.order.stages - 1
        return engine.backward_pass(
            parameters, complete, split=split, micro_batch=action.micro_batch, last_stage=last_stage
        )

    def _run(self, action: Action, batch: Any, taken: _Taken | None) -> list[Tensor]:
        """Compute an action; return the loss if it is the forward pass of the last stage."""
        at = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            return self._forward(action, batch, taken)
        flight = self._flights[at]
        if taken is not None:
            flight.gradient = taken[0]
            flight.taken += [] if taken[1] is None else [taken[1]]
        if action.kind is Kind.INPUT:
            self._backward_input(action, flight, taken)
        elif action.kind is Kind.WEIGHT and flight.groups is not None:
            self._backward_weight(flight)
        elif flight.output is not None:
            gradient = flight.gradient
            if gradient is not None and action.stage in self._backward_routes:
                gradient = gradient.clone()  # autograd may make a view of it the `.grad` of a weight, without a copy
            torch.autograd.backward(flight.output, gradient)
        if action.kind is Kind.BACKWARD and flight.x is not None:
            self._give(action, _or_zeros(flight.x.grad, flight.x), taken)
        if action.ends:
            for message in self._flights.pop(at).taken:
                self._messages.release(*message)
        return []

    def _forward(self, action: Action, batch: Any, taken: _Taken | None) -> list[Tensor]:
        x = None if taken is None else taken[0].detach()
        if x is not None and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_()
        with self._first_pass():
            y = self._compute(action.stage, x, batch)
        last = action.stage == self.order.stages - 1
        if not last:
            self._give(action, y, taken)
        splits = self.order.schedule in ("zero_bubble", "zbv")
        if splits and y._is_view():
            y = y.clone()  # torch detaches the output in place after the first part, and a view cannot be detached
        # An edge does not keep the memory of the output.
        output = None if not y.requires_grad else y if last or splits else get_gradient_edge(y)
        messages = [] if taken is None or taken[1] is None else [taken[1]]
        self._flights[action.stage, action.micro_batch] = _Flight(x, output, messages)
        self.most_in_flight = max(self.most_in_flight, len(self._flights))
        return [y.detach().clone()] if last else []

    def _backward_input(self, action: Action, flight: _Flight, taken: _Taken | None) -> None:
        """Compute the gradient of the stage's input and send it. The first stage has none: all is left for later.

        Raise NotImplementedError for a graph that cannot be split.
        """
        if flight.x is None:
            return
        from torch.distributed.pipelining._backward import stage_backward_input  # the order has imported the package

        gradient = None
        if isinstance(flight.output, Tensor) and flight.x.requires_grad:
            gradients = None if flight.gradient is None else [flight.gradient]
            edge = get_gradient_edge(flight.output)
            used = (leaf for leaf in _leaves_of(edge.node) if leaf is not flight.x)  # they need not be parameters
            flight.weights = list(dict.fromkeys([*map(leaf_of, self.parameters(action.stage)), *used]))
            try:
                (gradient,), groups = stage_backward_input([flight.output], gradients, [flight.x], flight.weights)  # type: ignore[arg-type]
            except RuntimeError as error:  # torch wraps every error
                cause = error.__cause__ or error
                if type(cause) is not RuntimeError:
                    raise cause from None
                raise NotImplementedError(
                    f"stage {action.stage}: its backward pass fails where {self.order.schedule} splits it: {cause}: use"
                    " schedule 1f1b, which splits none, checkpoint(use_reentrant=False) or blocks without torch.compile"
                ) from cause
            flight.x.grad, flight.output = None, edge
            if gradient is not None:  # torch groups weights by what they share with the input
                flight.groups = groups
        self._give(action, _or_zeros(gradient, flight.x), taken)

    def _backward_weight(self, flight: _Flight) -> None:
        """Compute the gradients of the stage's weights, and run the hooks that autograd runs after accumulation."""
        with GraphExecGroup():  # each layer has a pass of its own: activations are recomputed once for all of them
            backward_weights(flight.weights, flight.groups)
        for weight in flight.weights:
            if weight.grad is not None:
                for hook in tuple((weight._post_accumulate_grad_hooks or {}).values()):
                    hook(weight)

    def _take(self, action: Action) -> _Taken | None:
        """Wait for what the action needs of another stage, and return it; None if it needs nothing."""
        stage, number = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            source, route = stage - 1, self._forward_routes.get(stage)
        elif action.kind is Kind.WEIGHT:
            return None
        else:
            source, route = stage + 1, self._backward_routes.get(stage)
        if not 0 <= source < self.order.stages:
            return None
        if route is None:
            return self._handed.pop((source, stage, number)), None
        message = self._messages.receive(route, *self._shape)
        # A stage may write to its input: `data` has a version counter of its own, while all slots share one.
        return message.tensor.data, (route, message)

    def _give(self, action: Action, x: Tensor, taken: _Taken | None) -> None:
        """Send the result of an action to the stage that needs it. taken: what the action has taken."""
        if self.group is not None and self._key not in self._shapes:
            self._agree_on_shape(x)
        if self.group is not None and (x.shape, x.dtype) != self._shape:
            shape, dtype = self._shape
            raise ValueError(
                f"stage {action.stage} sends {list(x.shape)} {x.dtype}: expected {list(shape)} {dtype}, as the first"
                " stage has sent for such micro-batches"
            )
        forward = action.kind is Kind.FORWARD
        target = action.stage + 1 if forward else action.stage - 1
        route = (self._forward_routes if forward else self._backward_routes).get(target)
        if route is None:
            self._handed[action.stage, target, action.micro_batch] = _outside(taken, x.detach())
        else:
            self._messages.send(route, x.detach().contiguous())

    def _open(self, batches: Sequence[Any], *, compares: bool) -> None:
        """Open the routes for messages of such micro-batches. Collective.

        compares: whether ranks compare the micro-batches, as they do in any case the first time. Only the rank of the
        first stage can then tell the shape of the messages, after its first pass.
        """
        if self.group is None:
            return
        self._key = tuple(_described(batches[0]))
        if compares or self._key not in self._shapes:
            self._compare(batches, self.group)
        if self._key in self._shapes:
            self._choose_messages()
        elif 0 not in self.stages:
            with self._first_pass():
                pass  # the rank of the first stage computes
            self._agree_on_shape(None)

    def _first_pass(self) -> AbstractContextManager[None]:
        """Mark a pass: if others wait for its output to tell the shape of the messages, they learn of its error."""
        if self.group is None or self._key in self._shapes:
            return nullcontext()
        return agreement("first pass of the pipeline", self.group)

    def _agree_on_shape(self, y: Tensor | None) -> None:
        """Learn the shape and dtype of the messages from the first output of the first stage, `y` on its rank."""
        assert self.group is not None
        found = None if y is None else (tuple(y.shape), y.dtype)
        answers = exchange(found, self.group, op="shape of the pipeline's messages")
        shape, dtype = answers[self.order.rank_of[0]]
        self._shapes[self._key] = torch.Size(shape), dtype
        self._choose_messages()

    def _compare(self, batches: Sequence[Any], group: dist.ProcessGroup) -> None:
        """Raise Disagreement on every rank of the pipeline if ranks have begun with different micro-batches."""
        inputs = {f"batches{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(list(batches))[0]}
        compare_inputs("pipeline", inputs, [group], self.device)

    def _choose_messages(self) -> None:
        assert self.group is not None
        self._shape = shape, dtype = self._shapes[self._key]
        nbytes = slot_size(shape.numel() * dtype.itemsize)
        if (nbytes, dtype) not in self._opened:
            messages = open_messages(self.group, self.device, dtype, self._routes, nbytes)
            self._opened[nbytes, dtype] = messages, choose_implementation(self.device, dtype, self.group)
        self._messages, self._choice = self._opened[nbytes, dtype]
        self._messages.begin()

    def _finish(self) -> None:
        if self.group is not None:
            self._messages.finish()


def _or_zeros(gradient: Tensor | None, x: Tensor) -> Tensor:
    """Return the gradient of x; without one, the stage's output does not depend on x."""
    return torch.zeros_like(x) if gradient is None else gradient


def _outside(taken: _Taken | None, x: Any) -> Any:
    """Return x, or a copy if it is a tensor in the memory of a message: the next message overwrites it there."""
    if taken is None or taken[1] is None or not isinstance(x, Tensor):
        return x
    return x.clone() if _memory_of(x) == _memory_of(taken[0]) else x


def _memory_of(x: Tensor) -> int:
    """Return the address of the memory of a tensor; a sparse one has several, and shares none."""
    return local_tensor(x).untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def leaf_of(parameter: Tensor) -> Tensor:
    """Return the tensor that accumulates a parameter's gradient (`tpfuse.layers.local_parameter.offer_leaf`)."""
    borrowed = getattr(parameter, "local_leaf", None)
    return parameter if borrowed is None else cast(Tensor, borrowed.value)


def _leaves_of(output: Node) -> list[Tensor]:
    """Return the leaves whose gradients a backward pass from this node computes, in the order of a walk from it."""
    seen, left = {output}, [output]
    found: list[Tensor] = []
    while left:
        node = left.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


def routes(order: Order) -> tuple[list[Route], dict[int, int], dict[int, int]]:
    """Return the routes between ranks, and by stage the routes that bring its activations and its gradients."""
    found: list[Route] = []
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    counts = slots(timeline(order))
    for stage in range(order.stages):
        for source, by_stage, what in ((stage - 1, forward, "activations"), (stage + 1, backward, "gradients")):
            if 0 <= source < order.stages and order.rank_of[source] != order.rank_of[stage]:
                by_stage[stage] = len(found)
                count = counts[stage, by_stage is forward]
                found.append(Route(f"{what} for stage {stage}", order.rank_of[source], order.rank_of[stage], count))
    return found, forward, backward


def _described(batch: Any) -> Iterator[object]:
    """Yield what messages depend on: the shapes and dtypes of a micro-batch's tensors, and the types of other values.

    With a cache, for example, each context-parallel rank computes all tokens.
    """
    if isinstance(batch, Tensor):
        yield batch.shape, batch.dtype
    elif isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from ((name, each) for each in _described(value))
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from ((index, each) for each in _described(value))
    else:
        yield type(batch)
