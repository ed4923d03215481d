"""The proof that code which tpfuse does not know computes the same between modules that were converted.

`plan="auto"` recognises modules by their names, and what stands between them is somebody's own code: it splits packed
projections into heads, multiplies by parameters of its own, or reads a router. `Proof` runs this code as it is and as
one rank after another would run it, in this process and without communication. It compares what reaches the known
modules, what leaves the block, and the gradients of all that enters, parameters included.

What the known modules compute needs no proof. In their place are stand-ins, which return random values of the right
shape: all of them, or those that the rank would have. So each block is proved by itself:

| block           | known modules in it                                      | on a rank                               |
|-----------------|----------------------------------------------------------|-----------------------------------------|
| attention, MLP  | its projections, norms over all its heads or features    | its heads, its features                 |
| layer           | attention, MLP, what runs on whole sequences, linears    | its tokens                              |
| decoder         | embeddings, linears, layers, last norm                   | its tokens, between first layer and norm|

The stand-ins have no weights, so a block costs what its activations cost: a few tokens at the true numbers of heads and
features. One of several equal layers is tried. The model may be on the meta device. On one core a tiny model
takes 0.05 s, and Llama 70B for 8 ranks 2.5 s and 240 MB.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.drop_in.converted import Ranges
from tpfuse.drop_in.experts import ExpertShards
from tpfuse.drop_in.replicated import rms_norm_terms
from tpfuse.drop_in.sketch import (
    LARGE,
    apart,
    first_input,
    give_values,
    kind_of,
    line_of,
    refuse_set_forward,
    set_forwards,
    sketch,
    width_of,
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
from tpfuse.drop_in.tried_block import KnownModule, ModuleCall, Part, TriedBlock, chunk, entire, rows, summand
from tpfuse.drop_in.tried_experts import try_experts

_SEQUENCES, _TOKENS = 2, 3  # sequences, and tokens of each on a rank
_WIDE = 2**16  # features of an output that gets no values: logits


class Proof:
    """The parts of a model that `recognise` may convert for `ranks` tensor-parallel ranks. The model is left as it is.

    Its methods raise NotImplementedError, with the reason, for what is not proved.
    """

    def __init__(self, model: nn.Module, ranks: int, layers: Sequence[nn.Module]) -> None:
        """layers: the modules of which those that are built alike are tried once."""
        self.ranks = ranks
        self._calls: dict[str, list[ModuleCall]] = {}
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
        self._refuse_replaced_in_layer(path)
        (prepared,) = (style for style in styles[path] if isinstance(style, FusedPrepareModuleInput))
        known = self._projections(path, styles, sharded, prepared)
        enters = summand if prepared.sum_gradients else entire
        self._prove(path, styles, known, enters, self._tokens if sharded else entire)

    def experts(self, path: str, shards: ExpertShards) -> None:
        """Prove that the parts of experts add up to them. They are tried at few features, and all of their number."""
        if self.ranks == 1:
            return
        self._refuse_replaced_in_layer(path)
        module = self._modules[path]
        self._once(
            (kind_of(module), shards), [path], lambda: try_experts(module, shards, self._calls[path], self.ranks)
        )

    def layer(self, path: str, styles: Mapping[str, Sequence[ParallelStyle]]) -> None:
        """Prove a layer whose modules have these styles, on shards of the sequence."""
        if self.ranks == 1:
            return
        known: dict[str, KnownModule] = {}
        for name, its_styles in styles.items():
            kinds = {type(style) for style in its_styles}
            alone = FusedSequenceParallel in kinds and width_of(self._modules[name]) is not None
            if self._owner(name) == path and (kinds & {FusedPrepareModuleInput, WholeSequences} or alone):
                known[name] = KnownModule(self._tokens, self._tokens)
        self._refuse_replaced(path, known)
        self._prove(path, styles, known, self._tokens, self._tokens, lambda x: entire)

    def _owner(self, name: str) -> str:
        """Return the name of the module that calls the module `name`: the one that has it, or has it in a list."""
        owner = name.rpartition(".")[0]
        return owner.rpartition(".")[0] if isinstance(self._modules[owner], nn.ModuleList) else owner

    def decoder(self, name: str, layers: Sequence[str], norm: str) -> None:
        """Prove the forward that calls these layers and then the norm, with shards of the sequence between them."""
        if self.ranks == 1:
            return
        self._refuse_replaced("", layers)
        while name and name not in self._calls:
            name = name.rpartition(".")[0]
        known = {each: KnownModule(self._tokens, self._tokens) for each in layers if each not in self._alike}
        known[layers[0]] = KnownModule(entire, self._tokens)
        known[norm] = KnownModule(self._tokens, entire)
        parts = tuple(f"{each}." for each in (*layers, norm))
        for other, module in self._modules.items():
            inside = other.startswith(f"{name}." if name else "") and other in self._calls
            if inside and width_of(module) is not None and not other.startswith(parts):
                known[other] = KnownModule(entire, entire)
        self._prove(name, {}, known, entire, entire, self._of_state)

    def calls(self, path: str) -> bool:
        """Return whether the model calls the module in a layer as a module, not only its methods or its weights."""
        return self._tried(path) in self._calls

    def reads_input(self, path: str, name: str) -> bool:
        """Return whether the module `name` in another one gets the first input of that; True if nothing was tried."""
        path = self._tried(path)
        inside = self._calls.get(f"{path}.{name}")
        if not inside:
            return True
        outside = self._calls[path][0]
        return first_input(inside[0].args, inside[0].kwargs) is first_input(outside.args, outside.kwargs)

    def _tried(self, path: str) -> str:
        """Return the path of the module that was tried for the one at `path`, which may be in a layer alike."""
        for name, other in self._alike.items():
            if path.startswith(f"{name}."):
                return other + path.removeprefix(name)
        return path

    def _refuse_replaced_in_layer(self, path: str) -> None:
        """Raise NotImplementedError for a module in `path`, or a layer around it, whose forward is not tried."""
        self._refuse_replaced(path)
        for layer in self._layers:
            if _inside(path, layer) and layer in self._replaced:
                self._refuse_replaced(layer)

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
        return self._tokens if x.ndim == 3 and x.shape[1] == _TOKENS else entire

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
        self._calls.setdefault(name, []).append(ModuleCall(args, kwargs))

    def _end(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._calls[name][-1].out = out

    def _pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the first input, in the place of an output like that of the module `name`."""
        return with_first_tensor(self._calls[name][-1].out, first_input(args, kwargs))

    def _projections(
        self, path: str, styles: Mapping[str, Sequence[ParallelStyle]], sharded: bool, prepared: FusedPrepareModuleInput
    ) -> dict[str, KnownModule]:
        known = {}
        fused = all(width_of(self._modules[f"{path}.{name}"]) is not None for name in prepared.projections)
        output = self._tokens if sharded else entire
        features = partial(chunk, self.ranks, -1)
        for name, (style, *_) in styles.items():
            width = width_of(self._modules[name])
            if isinstance(style, FusedColwiseParallel) and width is not None:
                of_ranks = [_rows(style, width, rank, self.ranks) for rank in range(self.ranks)]
                projects = fused and name.removeprefix(f"{path}.") in prepared.projections
                of_features = isinstance(style.input_layouts[0], Shard)
                takes = features if of_features else entire if style.sum_input else summand
                known[name] = KnownModule(takes, partial(rows, -1, of_ranks), projects)
            elif isinstance(style, FusedRowwiseParallel):
                shards = isinstance(style.output_layouts[0], Shard)
                known[name] = KnownModule(features, self._tokens if shards else entire)
            elif isinstance(style, ReplicatedParallel) and style.sharded and rms_norm_terms(self._modules[name]):
                known[name] = KnownModule(features, features, others=features)
            elif isinstance(style, ReplicatedParallel) and width is not None and ".lora_" in name:
                base, *_ = styles[f"{name.partition('.lora_')[0]}.base_layer"]
                part = output if isinstance(base, FusedRowwiseParallel) else summand
                known[name] = KnownModule(part, part) if style.sum_gradients else KnownModule(entire, entire)
        return known

    def _prove(
        self,
        path: str,
        styles: Mapping[str, Sequence[ParallelStyle]],
        known: Mapping[str, KnownModule],
        enters: Part,
        leaves: Part,
        others: Callable[[Tensor], Part] | None = None,
    ) -> None:
        """Compare the block as it is with what each rank computes of it. enters, leaves: a rank's part of its tensors.

        others: gives the part of a rank's tensor in the output that is not the first; None if these are not compared.
        """
        module = self._modules[path]
        key = kind_of(module), tuple((name.removeprefix(path), one.projects) for name, one in known.items()), leaves
        block = TriedBlock(self._modules, path, styles, known, enters, leaves, self._calls, others, self.ranks)
        self._once(key, [path, *known], block.prove)

    def _once(self, key: Any, called: Iterable[str], attempt: Callable[[], None]) -> None:
        """Try what has this key, if nothing with it was tried; raise the reason that was found. called: the modules."""
        if key not in self._reasons:
            try:
                if any(name not in self._calls for name in called):
                    raise NotImplementedError(self._failure)
                attempt()
                self._reasons[key] = ""
            except NotImplementedError as reason:
                self._reasons[key] = str(reason)
        if self._reasons[key]:
            raise NotImplementedError(self._reasons[key])


def _inside(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _rows(style: FusedColwiseParallel, height: int, rank: int, ranks: int) -> Ranges:
    """Return [start, stop) of the output features that a rank has of a column-parallel layer."""
    if style.ranges is not None:
        return style.ranges[rank]
    each = height // style.parts
    share = -(-each // ranks)
    return tuple((part * each + rank * share, part * each + (rank + 1) * share) for part in range(style.parts))


def _invented(generator: torch.Generator, module: nn.Module, width: int | None, *args: Any, **kwargs: Any) -> Tensor:
    """Return random values in the place of what a module would compute. width: its features, None for its input's."""
    shape = first_input(args, kwargs).shape
    if width is not None:
        shape = torch.Size((*shape, width) if isinstance(module, nn.Embedding) else (*shape[:-1], width))
    if width is not None and width > _WIDE:
        return torch.zeros((), dtype=torch.float64).expand(shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
