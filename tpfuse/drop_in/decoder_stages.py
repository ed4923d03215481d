"""The stages of a pipeline through a decoder of transformers.

The layers of such a decoder need more than hidden states: masks, positions, rotary tables. The decoder's own forward
computes these from the ids. So every stage runs this forward, for the same ids, with stand-ins in place of what the
stage does not have. Their values, zeros without memory, reach no layer of the stage: its first layer takes the stage's
input, whatever it is given, and the output of its last layer is kept aside.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from tpfuse.drop_in.sequence_hooks import PreparedInput, SequenceLength
from tpfuse.drop_in.sketch import first_input, with_first_input
from tpfuse.drop_in.structure import HEADS, LAST_NORMS, TOKEN_EMBEDDINGS, decoders
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.parallel.pipeline.parts import Parts

# Falcon and Bloom, which has a norm of its embeddings, have other names; OPT has embed_positions.
_EMBEDDINGS = (*TOKEN_EMBEDDINGS, "word_embeddings", "word_embeddings_layernorm", "wpe", "embed_positions")


class DecoderParts(NamedTuple):
    """The parts of a decoder: its module, and the names of its children. heads: the projections to the vocabulary."""

    decoder: nn.Module
    embeddings: tuple[str, ...]
    layers: str
    norm: str
    heads: tuple[nn.Module, ...]

    def of(self, model: nn.Module) -> Parts:
        """Return the parts as a pipeline cuts them."""
        first = [self.decoder.get_submodule(name) for name in self.embeddings]
        last = [self.decoder.get_submodule(self.norm), *self.heads]
        return Parts(model, self.decoder.get_submodule(self.layers).children(), first, last)


def decoder_parts(model: nn.Module) -> DecoderParts:
    """Return the parts of a whole model. Raise ValueError if it has others, which a pipeline could not place."""
    found = list(decoders(model))
    if len(found) != 1:
        raise ValueError(f"a pipeline cuts models with one decoder whose attention tpfuse knows: found {len(found)}")
    path, decoder, layers = found[0]
    children = dict(decoder.named_children())
    norm = next((name for name in LAST_NORMS if name in children), None)
    if norm is None:
        raise ValueError(f"a pipeline cannot cut {path or 'the model'}: it has no last norm, {', '.join(LAST_NORMS)}")
    if getattr(getattr(decoder, "config", None), "num_kv_shared_layers", 0):
        raise ValueError("a pipeline cannot cut layers that share keys and values (num_kv_shared_layers)")
    heads = tuple(module for name, module in model.named_modules() if name.rpartition(".")[2] in HEADS)
    parts = DecoderParts(decoder, tuple(name for name in _EMBEDDINGS if name in children), layers, norm, heads)
    known = [*(children[name] for name in (*parts.embeddings, layers, norm)), *heads]
    placed = {parameter for module in known for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in placed:
            raise ValueError(f"a pipeline cannot place {name}: it is in no layer, embedding, last norm or head")
    return parts


@dataclass
class _StagePass:
    x: Tensor | None = None  # the stage's input
    rows: tuple[int, ...] = ()  # (batch, tokens) that the decoder's forward sees
    output: Tensor | None = None


class DecoderStages:
    """The `stages` of this rank of a pipeline through the decoder of `model`, which may be parallelized.

    Parameters of other stages are freed, and all others keep their names. A parameter that the first and the last stage
    share is at both ends, under one name. decoder: the module whose forward `only` changes. Raise ValueError as
    `decoder_parts` does.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        names = decoder_parts(model)
        self.stages, self.decoder = list(stages), names.decoder
        layers = list(names.decoder.get_submodule(names.layers).children())
        skipped = [_Skipped(layer) for layer in layers]
        # Tensor-parallel layers keep the length of sequences there; the model's first layer sets it.
        hooks = (hook for hook in layers[0]._forward_pre_hooks.values() if isinstance(hook, PreparedInput))
        length = next((hook.length for hook in hooks), None)
        self._parts = names.of(model)
        self._parts.keep(stages)
        self._pass = _StagePass()
        self._children: dict[int, dict[str, nn.Module]] = {}
        for stage in stages:
            here: list[nn.Module] = list(skipped)
            for index in stage.layers:
                enters, leaves = index == stage.layers[0] and not stage.first, index == stage.layers[-1]
                here[index] = _StageLayer(layers[index], self._pass, enters, leaves and not stage.last, length)
            embeddings = () if stage.first else names.embeddings
            children: dict[str, nn.Module] = {name: _StandInEmbedding(self._pass) for name in embeddings}
            self._children[stage.index] = children | {names.layers: nn.ModuleList(here)}
            if not stage.last:
                self._children[stage.index][names.norm] = _StandInNorm()

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        """Return the modules with the parameters of a stage of this rank."""
        return [part for part in self._parts.of(stage) if isinstance(part, nn.Module)]

    @contextmanager
    def only(self, stage: Stage, x: Tensor | None, rows: tuple[int, ...]) -> Iterator[_StagePass]:
        """Let the decoder's forward compute a stage of this rank alone; unless it is the last one, `output` is set.

        x: the output of the stage before it, None for the first stage. rows: (batch, tokens) of the ids.
        """
        own = dict(self.decoder._modules)
        self._pass.x, self._pass.rows, self._pass.output = x, rows, None
        self.decoder._modules.update(self._children[stage.index])
        try:
            yield self._pass
        finally:
            self.decoder._modules.update(own)
            self._pass.x = self._pass.output = None


class _Skipped(nn.Module):
    """A layer that is not in the stage. Decoders read attributes of layers, such as attention_type, so it has them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        read = {name: value for name, value in vars(layer).items() if isinstance(value, str | int)}
        self.__dict__.update(read)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [1, batch, tokens, width] for hidden states, since some decoders take the first entry."""
        return _hidden(args, kwargs).unsqueeze(0)


class _StandInNorm(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [batch, tokens, width]."""
        return _hidden(args, kwargs)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = first_input(args, kwargs)
    return hidden.reshape(hidden.shape[-3:])


class _StandInEmbedding(nn.Module):
    def __init__(self, running: _StagePass) -> None:
        super().__init__()
        self.running = running

    @property
    def weight(self) -> Tensor | None:
        """Return the stage's input, which is where the weight would be: Llama 4 reads its device."""
        return self.running.x

    def forward(self, ids: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Return zeros [*ids.shape, width] for ids or a mask, and what another stand-in has returned for a norm's."""
        x = self.running.x
        assert x is not None
        return ids if ids.ndim == 3 else x.new_zeros(()).expand(*ids.shape, x.shape[-1])


class _StageLayer(nn.Module):
    """A layer of the stage. enters, leaves: whether its input, and its output, are those of the stage."""

    def __init__(
        self, layer: nn.Module, running: _StagePass, enters: bool, leaves: bool, length: SequenceLength | None
    ) -> None:
        super().__init__()
        self.layer, self.running, self.enters, self.leaves, self.length = layer, running, enters, leaves, length

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the decoder's forward takes for the layer's output."""
        running = self.running
        if self.enters:
            if self.length is not None:
                self.length.value = running.rows[1]
            assert running.x is not None
            args, kwargs = with_first_input(args, kwargs, running.x)
        out = self.layer(*args, **kwargs)
        if not self.leaves:
            return out
        running.output = y = out if isinstance(out, Tensor) else out[0]
        return y.new_zeros(()).expand(1, *running.rows, y.shape[-1])
