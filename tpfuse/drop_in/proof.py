"""The proof that code which tpfuse does not know computes the same between modules that were converted.

`plan="auto"` recognises modules by their names, and what stands between them is somebody's own code: it splits packed
projections into heads, multiplies by parameters of its own, or reads a router. `Proof` runs this code as it is and as
one rank after another would run it, in this process and without communication. It compares what reaches the known
modules, what leaves the block, and the gradients of all that enters, parameters included.

What the known modules compute needs no proof. In their place are stand-ins, which return random values of the right
shape: all of them, or those that the rank would have. So each block is proved by itself:

| block           | known modules in it                                      | on a rank                               |
|-----------------|----------------------------------------------------------|-----------------------------------------|
| attention, MLP  | its projections                                          | its heads, its features                 |
| layer           | attention, MLP, what runs on whole sequences, linears    | its tokens                              |
| decoder         | embeddings, linears, layers, last norm                   | its tokens, between first layer and norm|

The stand-ins have no weights, so a block costs what its activations cost: a few tokens at the true numbers of heads and
features. One of several equal layers is tried. The model may be on the meta device. On one core a tiny model
takes 0.05 s, and Llama 70B for 8 ranks 2.5 s and 240 MB.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.drop_in.converted import stand_in
from tpfuse.drop_in.sketch import (
    LARGE,
    agree,
    agree_in_shape,
    apart,
    first_input,
    first_tensor,
    give_values,
    kind_of,
    largest_value,
    line_of,
    refuse_set_forward,
    set_forwards,
    sketch,
    tensors_in,
    width_of,
    with_first_input,
    with_first_tensor,
)
from tpfuse.drop_in.styles import (
    FusedColwiseParallel,
    FusedPrepareModuleInput,
    FusedRowwiseParallel,
    FusedSequenceParallel,
    ReplicatedParallel,
    WholeSequences,
)

_SEQUENCES, _TOKENS = 2, 3  # sequences, and tokens of each on a rank
_WIDE = 2**16  # features of an output that gets no values: logits

Part = Callable[[Tensor, int], Tensor]  # a rank's part of a tensor


@dataclass(frozen=True)
class _KnownModule:
    takes: Part  # a rank's part of its input
    gives: Part  # and of its output
    projects: bool = False  # whether its parent gathers its input


@dataclass
class _ModuleCall:
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


class Proof:
    """The parts of a model that `recognise` may convert for `ranks` tensor-parallel ranks. The model is left as it is.

    Its methods raise NotImplementedError, with the reason, for what is not proved.
    """

    def __init__(self, model: nn.Module, ranks: int, layers: Sequence[nn.Module]) -> None:
        """layers: the modules of which those that are built alike are tried once."""
        self.ranks = ranks
        self._calls: dict[str, list[_ModuleCall]] = {}
        self._reasons: dict[Any, str] = {}
        self._alike: dict[str, str] = {}  # layers, by the names of others that are built like them
        self._failure = "the model's forward does not call it"
        names = {module: name for name, module in model.named_modules()}
        self._layers = [names[layer] for layer in layers]
        self._replaced = set_forwards(model)
        if ranks == 1:
            return
        with apart():
            self._model = sketch(model)
            self._modules = dict(self._model.named_modules())
            first: dict[Any, str] = {}
            kinds = [(kind_of(layer), *set_forwards(layer)) for layer in layers]
            alike = {name: first.setdefault(kind, name) for name, kind in zip(self._layers, kinds, strict=True)}
            self._alike = {name: other for name, other in alike.items() if name != other}
            self._record()

    def block(self, path: str, styles: Mapping[str, Sequence[ParallelStyle]], sharded: bool) -> None:
        """Prove an attention or MLP with these styles. sharded: a rank returns its tokens of the output."""
        if self.ranks == 1:
            return
        self._refuse_replaced(path)
        for layer in self._layers:
            if _inside(path, layer) and layer in self._replaced:
                self._refuse_replaced(layer)
        (prepared,) = (style for style in styles[path] if isinstance(style, FusedPrepareModuleInput))
        known = self._projections(path, styles, sharded, prepared)
        self._prove(path, styles, known, _whole, self._tokens if sharded else _whole, prepared.attributes)

    def layer(self, path: str, styles: Mapping[str, Sequence[ParallelStyle]]) -> None:
        """Prove a layer whose modules have these styles, on shards of the sequence."""
        if self.ranks == 1:
            return
        known: dict[str, _KnownModule] = {}
        for name, its_styles in styles.items():
            kinds = {type(style) for style in its_styles}
            alone = FusedSequenceParallel in kinds and width_of(self._modules[name]) is not None
            if name.rpartition(".")[0] == path and (kinds & {FusedPrepareModuleInput, WholeSequences} or alone):
                known[name] = _KnownModule(self._tokens, self._tokens)
        self._refuse_replaced(path, known)
        self._prove(path, styles, known, self._tokens, self._tokens, {}, lambda x: _whole)

    def decoder(self, name: str, layers: Sequence[str], norm: str) -> None:
        """Prove the forward that calls these layers and then the norm, with shards of the sequence between them."""
        if self.ranks == 1:
            return
        self._refuse_replaced("", layers)
        while name and name not in self._calls:
            name = name.rpartition(".")[0]
        known = {each: _KnownModule(self._tokens, self._tokens) for each in layers if each not in self._alike}
        known[layers[0]] = _KnownModule(_whole, self._tokens)
        known[norm] = _KnownModule(self._tokens, _whole)
        parts = tuple(f"{each}." for each in (*layers, norm))
        for other, module in self._modules.items():
            inside = other.startswith(f"{name}." if name else "") and other in self._calls
            if inside and width_of(module) is not None and not other.startswith(parts):
                known[other] = _KnownModule(_whole, _whole)
        self._prove(name, {}, known, _whole, _whole, {}, self._of_state)

    def calls(self, path: str) -> bool:
        """Return whether the model calls the module in a layer as a module, not only its methods or its weights."""
        for name, other in self._alike.items():
            if path.startswith(f"{name}."):
                path = other + path.removeprefix(name)
                break
        return path in self._calls

    def _refuse_replaced(self, path: str, known: Iterable[str] = ()) -> None:
        """Raise NotImplementedError for a module in `path`, but in none that is known, whose forward is not tried."""
        for name in self._replaced:
            if _inside(name, path) and not any(_inside(name, one) for one in known):
                refuse_set_forward(name)

    def _tokens(self, x: Tensor, rank: int) -> Tensor:
        """Return a rank's tokens of x, [sequences, tokens, ...] or [sequences * tokens, ...]."""
        length = _TOKENS * self.ranks
        if x.ndim > 2 and x.shape[:2] == (_SEQUENCES, length):
            return x.chunk(self.ranks, 1)[rank]
        if x.ndim == 2 and len(x) == _SEQUENCES * length:
            return x.view(_SEQUENCES, length, -1).chunk(self.ranks, 1)[rank].flatten(0, 1)
        raise NotImplementedError(f"{_SEQUENCES} sequences of {length} tokens are a tensor {tuple(x.shape)} in it")

    def _of_state(self, x: Tensor) -> Part:
        """Return the part that x is of a tensor in a decoder's output: `WholeStates` gathers hidden states."""
        return self._tokens if x.ndim == 3 and x.shape[1] == _TOKENS else _whole

    def _record(self) -> None:
        """Run the model once, and keep the calls of all modules. Layers alike to another one return their input."""
        generator = torch.Generator().manual_seed(0)
        hooks, inside = [], (*self._alike, *(f"{layer}." for layer in self._alike))
        for name, module in self._modules.items():
            hooks.append(module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(self._end, name), with_kwargs=True))
            width = width_of(module)
            if name in self._alike:
                module.__dict__["forward"] = partial(self._pass_on, self._alike[name])
            if name.startswith(inside):
                continue
            if width is not None or any(x.numel() > LARGE for x in module.parameters(recurse=False)):
                module.__dict__["forward"] = partial(_invented, generator, module, width)
            give_values(module, generator)
        length = _TOKENS * self.ranks
        ids = (3 + torch.arange(_SEQUENCES * length)).view(_SEQUENCES, length)
        try:
            with torch.no_grad():
                self._model(ids)
        except Exception as error:  # any code may raise anything
            self._failure = f"the model's forward cannot be tried: {line_of(error)}"
        for hook in hooks:
            hook.remove()
        for name, module in self._modules.items():
            if name not in self._alike:
                module.__dict__.pop("forward", None)

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.setdefault(name, []).append(_ModuleCall(args, kwargs))

    def _end(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._calls[name][-1].out = out

    def _pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the first input, in the place of an output like that of the module `name`."""
        return with_first_tensor(self._calls[name][-1].out, first_input(args, kwargs))

    def _projections(
        self, path: str, styles: Mapping[str, Sequence[ParallelStyle]], sharded: bool, prepared: FusedPrepareModuleInput
    ) -> dict[str, _KnownModule]:
        known = {}
        fused = all(width_of(self._modules[f"{path}.{name}"]) is not None for name in prepared.projections)
        output = self._tokens if sharded else _whole
        for name, (style, *_) in styles.items():
            width = width_of(self._modules[name])
            if isinstance(style, FusedColwiseParallel) and width is not None:
                rows = [_rows(style, width, rank, self.ranks) for rank in range(self.ranks)]
                projects = fused and name.removeprefix(f"{path}.") in prepared.projections
                known[name] = _KnownModule(_whole, partial(_selected, rows), projects)
            elif isinstance(style, FusedRowwiseParallel):
                shards = isinstance(style.output_layouts[0], Shard)
                features = partial(_chunk, self.ranks, -1)
                known[name] = _KnownModule(features, self._tokens if shards else _whole)
            elif isinstance(style, ReplicatedParallel) and width is not None and ".lora_" in name:
                known[name] = _KnownModule(output, output) if style.sum_gradients else _KnownModule(_whole, _whole)
        return known

    def _prove(
        self,
        path: str,
        styles: Mapping[str, Sequence[ParallelStyle]],
        known: Mapping[str, _KnownModule],
        enters: Part,
        leaves: Part,
        attributes: Mapping[str, Any],
        others: Callable[[Tensor], Part] | None = None,
    ) -> None:
        """Compare the block as it is with what each rank computes of it. enters, leaves: a rank's part of its tensors.

        attributes: those that the block has on a rank. others: gives the part of a rank's tensor in the output that is
        not the first; None if these are not compared.
        """
        module = self._modules[path]
        key = kind_of(module), tuple((name.removeprefix(path), one.projects) for name, one in known.items()), leaves
        if key not in self._reasons:
            heads = partial(_chunk, self.ranks, 0)
            block = _TriedBlock(self._modules, path, styles, known, enters, leaves, heads, self._calls, others)
            try:
                if path not in self._calls or any(name not in self._calls for name in known):
                    raise NotImplementedError(self._failure)
                with apart():
                    whole = block.run(None, {})
                    _compare(whole, (block.run(rank, attributes) for rank in range(self.ranks)))
                self._reasons[key] = ""
            except NotImplementedError as reason:
                self._reasons[key] = str(reason)
        if self._reasons[key]:
            raise NotImplementedError(self._reasons[key])


@dataclass
class _TriedBlock:
    modules: Mapping[str, nn.Module]
    path: str
    styles: Mapping[str, Sequence[ParallelStyle]]
    known: Mapping[str, _KnownModule]
    enters: Part
    leaves: Part
    of_heads: Part  # a rank's part of parameters with an entry for each head
    calls: Mapping[str, list[_ModuleCall]]  # of all modules when the model ran
    others: Callable[[Tensor], Part] | None  # as in `Proof._prove`
    seeds: dict[str, Tensor] = field(default_factory=dict)

    def run(self, rank: int | None, attributes: Mapping[str, Any]) -> _Computed:
        """Return what the block computes on a rank, or (None) as it is. Raise NotImplementedError if it fails."""
        run, call, module = _Computed(), self.calls[self.path][0], self.modules[self.path]
        given = first_input(call.args, call.kwargs)
        if any(one.projects for one in self.known.values()):
            given = stand_in(given, given.shape)
        else:
            given = run.enter("its input", given, self.enters, rank)
        forwards = {name: partial(self._stand_in, run, given, rank, name) for name in self.known}
        args, kwargs = with_first_input(call.args, call.kwargs, given)
        sharded = [name for style in self.styles.get(self.path, ()) for name in getattr(style, "sharded", ())]
        own = {name: x for name, x in module._parameters.items() if name in sharded and x is not None}
        parameters: dict[str, Any] = module._parameters
        parameters.update({name: run.enter(name, x, self.of_heads, rank) for name, x in own.items()})
        before: dict[str, Any] = {}
        try:
            before |= {name: module.__dict__[name] for name in attributes}
            module.__dict__.update(attributes)
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
            parameters.update(own)
            module.__dict__.update(before)
            for name in forwards:
                self.modules[name].__dict__.pop("forward", None)
        run.leaving["its output"] = first, self.leaves
        for index, x in enumerate(tensors_in(out)):
            if self.others is not None and x is not first:
                run.leaving[f"tensor {index} of its output"] = x, self.others(x)
        for name, parameter in module.named_parameters(prefix=self.path):
            owned = any(name.startswith(f"{one}.") for one in self.known)
            owned = owned or name.removeprefix(f"{self.path}.") in own
            if parameter.requires_grad and parameter.is_contiguous() and not owned:  # others have no values
                run.entering[name.removeprefix(f"{self.path}.")] = parameter, self.part_of(name)
        self._differentiate(run, rank)
        return run

    def part_of(self, parameter: str) -> Part:
        """Return what a rank computes of a parameter's gradient: all of it, or a part if a style sums the parts."""
        owner = parameter.rpartition(".")[0]
        while len(owner) > len(self.path) and owner not in self.styles:
            owner = owner.rpartition(".")[0]
        summed = any(
            isinstance(style, FusedSequenceParallel) or (isinstance(style, ReplicatedParallel) and style.sum_gradients)
            for style in self.styles.get(owner, ())
        )
        return _summand if summed else _whole

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
                run.leaving[f"{again}argument {index} of {called}"] = other, _whole
        calls = self.calls[name]
        out = calls[min(number, len(calls) - 1)].out
        first = run.enter(f"{again}the output of {called}", first_tensor(out), one.gives, rank)
        if not isinstance(out, tuple):
            return with_first_tensor(out, first)
        others = enumerate(out[1:], 1)  # whole on all ranks, such as a parameter that the layer adds
        whole = (
            run.enter(f"{again}output {index} of {called}", x, _whole, rank) if isinstance(x, Tensor) else x
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


def _compare(whole: _Computed, ranks: Iterable[_Computed]) -> None:
    """Raise NotImplementedError unless the ranks' tensors and gradients are those of the whole block."""
    largest = max((largest_value(x) for x in whole.gradients.values()), default=0.0)
    totals = {key: torch.zeros_like(x) for key, x in whole.gradients.items() if whole.entering[key][1] is not _whole}
    for rank, run in enumerate(ranks):
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


def _agree_in_gradient(key: str, actual: Tensor, expected: Tensor, largest: float) -> None:
    agree(f"the gradient of {key}", actual, expected, max(largest_value(expected), 1e-3 * largest))


def _inside(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _whole(x: Tensor, rank: int) -> Tensor:
    return x


def _chunk(ranks: int, dim: int, x: Tensor, rank: int) -> Tensor:
    return x.chunk(ranks, dim)[rank]


def _summand(x: Tensor, rank: int) -> Tensor:
    """Return all of a parameter, of whose gradient a rank computes a part."""
    return x


def _part(x: Tensor, part: Part, rank: int | None) -> Tensor:
    return x if rank is None else part(x, rank)


def _rows(style: FusedColwiseParallel, height: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return [start, stop) of the output features that a rank has of a column-parallel layer."""
    if style.ranges is not None:
        return list(style.ranges[rank])
    rows = height // style.parts
    share = -(-rows // ranks)
    return [(part * rows + rank * share, part * rows + (rank + 1) * share) for part in range(style.parts)]


def _selected(rows: Sequence[Sequence[tuple[int, int]]], x: Tensor, rank: int) -> Tensor:
    return torch.cat([x[..., start:stop] for start, stop in rows[rank]], -1)


def _invented(generator: torch.Generator, module: nn.Module, width: int | None, *args: Any, **kwargs: Any) -> Tensor:
    """Return random values in the place of what a module would compute. width: its features, None for its input's."""
    shape = first_input(args, kwargs).shape
    if width is not None:
        shape = torch.Size((*shape, width) if isinstance(module, nn.Embedding) else (*shape[:-1], width))
    if width is not None and width > _WIDE:
        return torch.zeros((), dtype=torch.float64).expand(shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
