"""One block of a model, as it is and as each rank would run it (`tpfuse.drop_in.proof`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.drop_in.converted import Ranges, selected, stand_in
from tpfuse.drop_in.sketch import (
    agree,
    agree_in_shape,
    apart,
    first_input,
    first_tensor,
    largest_value,
    line_of,
    tensors_in,
    with_first_input,
    with_first_tensor,
)
from tpfuse.drop_in.styles import FusedSequenceParallel, ReplicatedParallel

Part = Callable[[Tensor, int], Tensor]  # a rank's part of a tensor


@dataclass(frozen=True)
class KnownModule:
    """A module of a block whose computation needs no proof."""

    takes: Part  # a rank's part of its input
    gives: Part  # and of its output
    projects: bool = False  # whether its parent gathers its input
    others: Part | None = None  # of its other inputs, None for `entire`


@dataclass
class ModuleCall:
    """A call of a module. out: None if it has not returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any = None


@dataclass
class _Computed:
    """The tensors that leave or enter a block, by descriptions: whole ones, with a rank's part of them."""

    leaving: dict[str, tuple[Tensor, Part]] = field(default_factory=dict)
    entering: dict[str, tuple[Tensor, Part]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of what enters

    def enter(self, key: str, x: Tensor, part: Part, rank: int | None) -> Tensor:
        """Return the rank's part of x, or (None) all of it, which enters the block."""
        if not x.is_floating_point():
            return _part(x, part, rank)
        leaf = x.detach().clone().requires_grad_()
        self.entering[key] = leaf, part
        return _part(leaf, part, rank).clone()  # foreign code may change it in place, as it may not change a leaf


@dataclass
class TriedBlock:
    """A block of a model that has run once, with the styles of its modules (`Proof`)."""

    modules: Mapping[str, nn.Module]
    path: str
    styles: Mapping[str, Sequence[ParallelStyle]]
    known: Mapping[str, KnownModule]
    enters: Part
    leaves: Part
    calls: Mapping[str, list[ModuleCall]]  # of all modules when the model ran
    others: Callable[[Tensor], Part] | None  # as in `Proof._prove`
    ranks: int
    seeds: dict[str, Tensor] = field(default_factory=dict)

    def prove(self) -> None:
        """Raise NotImplementedError unless the ranks' tensors and gradients are those of the block as it is."""
        with apart():
            whole = self.run(None)
            largest = max((largest_value(x) for x in whole.gradients.values()), default=0.0)
            summed = [key for key, (_, part) in whole.entering.items() if part is not entire]
            totals = {key: torch.zeros_like(whole.gradients[key]) for key in summed}
            for rank in range(self.ranks):
                run = self.run(rank)
                missing = [key for key in (*whole.leaving, *whole.entering) if key not in {*run.leaving, *run.entering}]
                if missing:
                    raise NotImplementedError(f"{missing[0]} is not there on a rank")
                for key, (expected, _) in whole.leaving.items():
                    x, part = run.leaving[key]
                    agree(key, x, _part(expected, part, rank), largest_value(expected))
                for key, gradient in run.gradients.items():
                    if key in totals:
                        totals[key] += gradient
                    else:
                        _agree_in_gradient(key, gradient, whole.gradients[key], largest)
            for key, total in totals.items():
                _agree_in_gradient(key, total, whole.gradients[key], largest)

    def run(self, rank: int | None) -> _Computed:
        """Return what the block computes on a rank, or (None) as it is. Raise NotImplementedError if it fails."""
        run, call, module = _Computed(), self.calls[self.path][0], self.modules[self.path]
        given = first_input(call.args, call.kwargs)
        if any(one.projects for one in self.known.values()):
            given = stand_in(given, given.shape)
        else:
            given = run.enter("its input", given, self.enters, rank)
        forwards = {name: partial(self._stand_in, run, given, rank, name) for name in self.known}
        args, kwargs = with_first_input(call.args, call.kwargs, given)
        sharded = self._sharded()
        before = [(tensors, name, tensors[name]) for tensors, name, *_ in sharded.values()]
        for key, (tensors, name, part) in sharded.items():
            tensors[name] = run.enter(".".join(key).removeprefix(f"{self.path}."), tensors[name], part, rank)
        try:
            for attributes, name, value in self._attributes() if rank is not None else ():
                before.append((attributes, name, attributes[name]))
                attributes[name] = value
            for name, forward in forwards.items():
                self.modules[name].__dict__["forward"] = forward
            out = module(*args, **kwargs)
            first = first_tensor(out)
        except NotImplementedError:
            raise
        except Exception as error:  # any code may raise anything
            where = "it cannot be tried" if rank is None else "it fails on a rank's part"
            raise NotImplementedError(f"{where}: {line_of(error)}") from None
        finally:
            for held, name, value in before:
                held[name] = value
            for name in forwards:
                self.modules[name].__dict__.pop("forward", None)
        run.leaving["its output"] = first, self.leaves
        for index, x in enumerate(tensors_in(out)):
            if self.others is not None and x is not first:
                run.leaving[f"tensor {index} of its output"] = x, self.others(x)
        for name, parameter in module.named_parameters(prefix=self.path):
            owned = any(name.startswith(f"{one}.") for one in self.known)
            owned = owned or tuple(name.rpartition(".")[::2]) in sharded
            if parameter.requires_grad and parameter.is_contiguous() and not owned:  # others have no values
                run.entering[name.removeprefix(f"{self.path}.")] = parameter, self.part_of(name)
        self._differentiate(run, rank)
        return run

    def _attributes(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield (a module's attributes, name, value on a rank) of what the styles of modules change."""
        for owner, styles in self.styles.items():
            for name, value in (pair for x in styles for pair in getattr(x, "attributes", {}).items()):
                yield self.modules[owner].__dict__, name, value

    def _sharded(self) -> dict[tuple[str, str], tuple[dict[str, Any], str, Part]]:
        """Return (tensors of a module, name, a rank's part) of those that a rank has or reads a part of.

        They are by (module, name). Modules that are known have no such tensors.
        """
        found = dict[tuple[str, str], tuple[dict[str, Any], str, Part]]()
        for owner, styles in self.styles.items():
            known = any(f"{owner}.".startswith(f"{one}.") for one in self.known)
            parts: dict[str, Part] = {}
            for style in styles if not known else ():
                if isinstance(style, ReplicatedParallel):
                    parts |= dict.fromkeys(style.sharded, partial(chunk, self.ranks, 0))
                    parts |= {name: partial(rows, *of_ranks) for name, of_ranks in style.ranges.items()}
            for name, part in parts.items():
                module = self.modules[owner]
                tensors: Any = module._buffers if name in module._buffers else module._parameters
                if tensors.get(name) is not None:
                    found[owner, name] = tensors, name, part
        return found

    def part_of(self, parameter: str) -> Part:
        """Return what a rank computes of a parameter's gradient: all of it, or a part if a style sums the parts."""
        owner = parameter.rpartition(".")[0]
        while len(owner) > len(self.path) and owner not in self.styles:
            owner = owner.rpartition(".")[0]
        summed = any(
            isinstance(style, FusedSequenceParallel) or (isinstance(style, ReplicatedParallel) and style.sum_gradients)
            for style in self.styles.get(owner, ())
        )
        return summand if summed else entire

    def _stand_in(self, run: _Computed, given: Tensor, rank: int | None, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the known module `name` returned when the model ran, or a rank's part of it."""
        one, called, x = self.known[name], name.removeprefix(f"{self.path}."), first_input(args, kwargs)
        number = sum(key.endswith(f"the output of {called}") for key in run.entering)
        again = f"call {number + 1}: " if number else ""
        if not one.projects:
            run.leaving[f"{again}the input of {called}"] = x, one.takes
        elif x is not given:
            raise NotImplementedError(f"{called} reads another input than that of the module")
        for index, other in enumerate((*args, *kwargs.values())):
            if isinstance(other, Tensor) and other is not x:  # a style prepares the first input alone
                other = torch.view_as_real(other) if other.is_complex() else other
                run.leaving[f"{again}argument {index} of {called}"] = other, one.others or entire
        calls = self.calls[name]
        out = calls[min(number, len(calls) - 1)].out
        first = run.enter(f"{again}the output of {called}", first_tensor(out), one.gives, rank)
        if not isinstance(out, tuple):
            return with_first_tensor(out, first)
        others = enumerate(out[1:], 1)  # whole on all ranks, such as a parameter that the layer adds
        whole = (
            run.enter(f"{again}output {index} of {called}", x, entire, rank) if isinstance(x, Tensor) else x
            for index, x in others
        )
        return type(out)((first, *whole))

    def _differentiate(self, run: _Computed, rank: int | None) -> None:
        """Set the gradients of what enters, for random gradients of what leaves."""
        leaving = {key: pair for key, pair in run.leaving.items() if pair[0].requires_grad}
        if rank is None:
            generator = torch.Generator().manual_seed(1)
            self.seeds = {
                key: torch.randn(x.shape, dtype=x.dtype, generator=generator) for key, (x, _) in leaving.items()
            }
        seeds = {key: _part(self.seeds[key], part, rank) for key, (_, part) in leaving.items() if key in self.seeds}
        for key in seeds if rank is not None else ():
            if leaving[key][1] is summand:
                seeds[key] = seeds[key] / self.ranks
        for key, seed in seeds.items():
            agree_in_shape(key, leaving[key][0], seed)
        inputs = [x for x, _ in run.entering.values()]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if seeds and inputs:
            outputs = [leaving[key][0] for key in seeds]
            try:
                found = torch.autograd.grad(outputs, inputs, list(seeds.values()), allow_unused=True)
            except RuntimeError as error:  # torch's reentrant checkpoint allows no such call
                raise NotImplementedError(f"its gradients cannot be tried: {line_of(error)}") from None
        for key, x, gradient in zip(run.entering, inputs, found, strict=True):
            run.gradients[key] = torch.zeros_like(x) if gradient is None else gradient


def _agree_in_gradient(key: str, actual: Tensor, expected: Tensor, largest: float) -> None:
    agree(f"the gradient of {key}", actual, expected, max(largest_value(expected), 1e-3 * largest))


def entire(x: Tensor, rank: int) -> Tensor:
    return x


def summand(x: Tensor, rank: int) -> Tensor:
    """Return all of a tensor, of whose gradient a rank computes a part."""
    return x


def chunk(ranks: int, dim: int, x: Tensor, rank: int) -> Tensor:
    return x.chunk(ranks, dim)[rank]


def rows(dim: int, ranges: Sequence[Ranges], x: Tensor, rank: int) -> Tensor:
    return selected(x, ranges[rank], dim)


def _part(x: Tensor, part: Part, rank: int | None) -> Tensor:
    return x if rank is None else part(x, rank)
