"""The plan of `parallelize(plan="auto")`: recognises transformers by the structure of their modules.

A decoder is a ModuleList of layers, one or more of them with an attention that is known, between an embedding and a
last norm, with or without a projection to the vocabulary. Attention and MLP are recognised by the names of their linear
layers, which model families share (`_ATTENTION`, `_MLP`).

A linear layer may be wrapped as PEFT's LoRA does: in a module with its `base_layer` and adapters `lora_A`, `lora_B`.
The base is sharded as without the wrapper. Beside a column-parallel base lora_A is replicated and lora_B sharded like
the base; beside a row-parallel one lora_A is row-parallel and lora_B replicated.

Everything else runs its own forward, with parameters that every rank holds whole. Names alone convert nothing:
`tpfuse.drop_in.proof` runs what stands between the linear layers as each rank would. A block that would compute
something else is left alone, a layer whose own code needs all tokens runs on whole sequences, and so does a decoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.drop_in.converted import Ranges
from tpfuse.drop_in.proof import Proof
from tpfuse.drop_in.sequence_hooks import SequenceLength
from tpfuse.drop_in.styles import (
    FusedColwiseParallel,
    FusedPrepareModuleInput,
    FusedRowwiseParallel,
    FusedSequenceParallel,
    ReplicatedParallel,
    WholeSequences,
    features,
)
from tpfuse.layers.sequence import splits

# (the projections in, the possible names of the projection out)
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "dense", "out_proj")),  # Llama, Mistral, Qwen, Gemma; Phi
    (("qkv_proj",), ("o_proj",)),  # Phi-3: all of q, then k, then v
    (("c_attn",), ("c_proj",)),  # GPT-2: all of q, then k, then v
    (("query_key_value",), ("dense",)),  # GPT-NeoX: q, k, v head by head
)
_MLP = (
    (("gate_proj", "up_proj"), ("down_proj",)),  # Llama, Mistral, Qwen, Gemma
    (("gate_up_proj",), ("down_proj",)),  # Phi-3: all of gate, then up
    (("c_fc",), ("c_proj",)),  # GPT-2
    (("fc1",), ("fc2",)),  # Phi
    (("dense_h_to_4h",), ("dense_4h_to_h",)),  # GPT-NeoX
)
LAST_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
TOKEN_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
_LENGTHS = ("position_ids",)  # arguments of attention whose last dimension is that of the whole sequence
HEADS = ("lm_head", "embed_out")
_OF_HEADS = ("sinks",)  # parameters of attention modules with an entry for each query head


@dataclass
class Recognised:
    """A model's plan: the styles of its modules by name, and the reasons why modules keep their own forward."""

    styles: dict[str, list[ParallelStyle]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, style: ParallelStyle) -> None:
        """Add a style of module `name`."""
        self.styles.setdefault(name, []).append(style)

    def join(self, other: "Recognised") -> None:
        """Add the plan of other modules, or of the same."""
        for name, styles in other.styles.items():
            self.styles.setdefault(name, []).extend(styles)
        self.kept |= other.kept


def _match(module: nn.Module, table: tuple[Any, ...]) -> tuple[tuple[str, ...], str] | None:
    """Return (names of the projections in, name of the projection out) of a module; None if it does not match."""
    children = dict(module.named_children())
    for inner, outer in table:
        last = next((name for name in outer if name in children), None)
        if last is not None and all(name in children for name in inner):
            return inner, last
    return None


def recognise(model: nn.Module, ranks: int, sequence_parallel: bool) -> Recognised:
    """Return the plan of a transformers-like model for `ranks` tensor-parallel ranks.

    Raise ValueError if `model` has no decoder, if a module of it is in two places, or if its heads cannot be divided
    among the ranks.
    """
    plan = Recognised()
    found = list(decoders(model))
    if not found:
        raise ValueError(f'plan "auto": {_nothing_found(model)}; give a plan {{"pattern": style, …}}')
    for name, base, layers in found:
        _check_places(model, name, base, (layers, *TOKEN_EMBEDDINGS, *LAST_NORMS))
    proof = Proof(model, ranks, [layer for _, base, layers in found for layer in base.get_submodule(layers).children()])
    for name, base, layers in found:
        try:
            part = _plan_decoder(name, base, layers, proof, SequenceLength() if sequence_parallel else None)
        except NotImplementedError as error:
            part = _plan_decoder(name, base, layers, proof, None)
            part.kept[_join(name, layers)] = f"its sequences stay whole: {error}"
        plan.join(part)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in HEADS:
            try:
                head = _base(module)
                if not isinstance(head, nn.Linear):
                    raise NotImplementedError(
                        f"it is a {type(head).__module__}.{type(head).__name__}: expected an nn.Linear"
                    )
                _plan_linear(plan, name, module, FusedColwiseParallel(output_layouts=Replicate()))
                for other, table in model.named_modules():  # an embedding with the head's weight, of another name
                    tied = isinstance(table, nn.Embedding) and table.weight is head.weight
                    if tied and other not in plan.styles:
                        plan.add(other, _embedding_style())
            except NotImplementedError as error:
                plan.kept[name] = str(error)
                plan.add(name, ReplicatedParallel())
    hooks_alone = FusedPrepareModuleInput | WholeSequences  # styles that convert no parameter
    for name, module in model.named_modules():
        styles = plan.styles.get(name, [])
        owns = any(True for _ in module.parameters(recurse=False))
        if owns and all(isinstance(style, hooks_alone) for style in styles):
            plan.add(name, ReplicatedParallel())
            parents = (parent for parent in plan.kept if name.startswith(f"{parent}."))
            reason = next((plan.kept[parent] for parent in parents), "every rank computes the same")
            plan.kept.setdefault(name, reason)
    _keep_what_is_tied(plan, model)
    return plan


def _check_places(model: nn.Module, decoder: str, base: nn.Module, children: Sequence[str]) -> None:
    """Raise ValueError if a module in these children of a decoder is in another place of the model too."""
    first = {module: name for name, module in model.named_modules()}
    for name, module in base.named_modules(prefix=decoder, remove_duplicate=False):
        planned = name.removeprefix(f"{decoder}.").partition(".")[0] in children
        styled = isinstance(module, nn.Dropout) or any(True for _ in module.parameters())
        if planned and styled and first[module] != name:
            raise ValueError(
                f'plan "auto": {name} is {first[module]}, one module in two places: expected a copy in each, whose'
                " parameters may be shared"
            )


def _embedding_style() -> FusedRowwiseParallel:
    return FusedRowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


def _keep_what_is_tied(plan: Recognised, model: nn.Module) -> None:
    """Keep embeddings and heads whole that share a parameter with a module that every rank holds whole."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)
    for names in owners.values():
        replicated = (name for name in names if any(isinstance(x, ReplicatedParallel) for x in plan.styles[name]))
        whole = next(replicated, None)
        for name in names if whole is not None else ():
            style, everything = plan.styles[name][0], (Replicate(),)
            takes_and_gives = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
            if takes_and_gives == (everything, everything):  # an embedding or a head
                plan.styles[name] = [ReplicatedParallel()]
                plan.kept[name] = f"it shares its weight with {whole}, which every rank holds whole"


def decoders(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name of a decoder, the decoder, name of its list of layers) of all decoders in a model."""
    for name, module in model.named_modules():
        for child, layers in module.named_children():
            if isinstance(layers, nn.ModuleList) and any(
                _match(part, _ATTENTION) for layer in layers for part in layer.children()
            ):
                yield name, module, child


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model's decoder. Raise ValueError if it has none with an attention that is known."""
    for _, decoder, layers in decoders(model):
        found = getattr(decoder, layers)
        assert isinstance(found, nn.ModuleList)
        return found
    raise ValueError(_nothing_found(model))


def _nothing_found(model: nn.Module) -> str:
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    found = "an encoder and a decoder" if both else "no list of layers with an attention that tpfuse knows"
    return f"found {found}: expected a decoder alone, of a family that docs/families.md lists"


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _plan_decoder(name: str, base: nn.Module, layers: str, proof: Proof, length: SequenceLength | None) -> Recognised:
    """Return the styles of a decoder. length: given if activations between layers are shards of the sequence.

    Raise NotImplementedError if they cannot be.
    """
    plan, children = Recognised(), dict(base.named_children())
    embedding = next((child for child in TOKEN_EMBEDDINGS if child in children), None)
    if embedding is not None:
        path, module = _join(name, embedding), children[embedding]
        if isinstance(module, nn.Embedding):
            plan.add(path, _embedding_style())
        else:
            plan.add(path, ReplicatedParallel())
            plan.kept[path] = f"it is a {type(module).__module__}.{type(module).__name__}: expected an nn.Embedding"
    stack: Any = children[layers]
    paths = [_join(name, layers, str(index)) for index in range(len(stack))]
    if length is not None:
        norm = next((child for child in LAST_NORMS if child in children), None)
        if norm is None:
            raise NotImplementedError(f"it has no last norm, one of {', '.join(LAST_NORMS)}")
        proof.decoder(name, paths, _join(name, norm))
        plan.add(
            paths[0],
            FusedPrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True, length=length
            ),
        )
        _plan_last_norm(plan, _join(name, norm), children[norm], length)
    for path, layer in zip(paths, stack, strict=True):
        part = _plan_layer(path, layer, proof, length)
        if length is not None:
            try:
                proof.layer(path, part.styles)
            except NotImplementedError as reason:
                part = _plan_layer(path, layer, proof, None)
                part.add(path, WholeSequences(length_arguments=_LENGTHS, length=length))
                part.kept[path] = f"on shards of the sequence {reason}"
        plan.join(part)
    return plan


def _plan_last_norm(plan: Recognised, path: str, norm: nn.Module, length: SequenceLength) -> None:
    if not any(True for child in norm.children() for _ in child.parameters()):
        plan.add(path, FusedSequenceParallel(gather_output=length))
        return
    plan.kept[path] = f"{type(norm).__name__} is no norm that tpfuse knows"
    plan.add(path, ReplicatedParallel())
    whole = FusedPrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True, length=length
    )
    plan.add(path, whole)


def _plan_layer(name: str, layer: nn.Module, proof: Proof, length: SequenceLength | None) -> Recognised:
    plan, sequence_parallel = Recognised(), length is not None
    for child, module in layer.named_children():
        path, part = _join(name, child), Recognised()
        if type(module) is nn.Dropout and sequence_parallel:
            plan.add(path, FusedSequenceParallel(use_local_output=True))
        attention, mlp = _match(module, _ATTENTION), _match(module, _MLP)
        try:
            if attention is not None:
                _plan_attention(part, path, module, *attention, proof.ranks, length)
            elif mlp is not None:
                _plan_mlp(part, path, module, *mlp, sequence_parallel)
            if attention is not None or mlp is not None:
                for dropout, inner in module.named_children():
                    if type(inner) is nn.Dropout and sequence_parallel:
                        part.add(_join(path, dropout), FusedSequenceParallel(use_local_output=True))
                proof.block(path, part.styles, sequence_parallel)
                plan.join(part)
                continue
        except NotImplementedError as reason:
            plan.kept[path] = str(reason)
        if not any(True for _ in module.children()):
            if not any(True for _ in module.parameters()):
                continue
            style = FusedSequenceParallel(use_local_output=True) if sequence_parallel else ReplicatedParallel()
            plan.add(path, style)
        else:
            plan.kept.setdefault(path, f"{type(module).__name__} is no attention or MLP that tpfuse knows")
            plan.add(path, ReplicatedParallel())
            if sequence_parallel:
                plan.add(path, WholeSequences(length_arguments=_LENGTHS, length=length))
            if name not in plan.styles and not proof.calls(path):
                plan.add(name, ReplicatedParallel())  # so that the layer's forward meets plain weights
    return plan


def _input(
    projections: tuple[str, ...], sequence_parallel: bool, length: SequenceLength | None = None, **attributes: Any
) -> FusedPrepareModuleInput:
    return FusedPrepareModuleInput(
        input_layouts=Shard(1) if sequence_parallel else Replicate(),
        desired_input_layouts=Replicate(),
        use_local_output=True,
        projections=projections,
        length_arguments=_LENGTHS,
        attributes=attributes,
        length=length,
    )


def _plan_mlp(
    plan: Recognised, path: str, module: nn.Module, inner: tuple[str, ...], outer: str, sequence_parallel: bool
) -> None:
    for name in (*inner, outer):
        _linear(module, name)
    for name, parameter in module.named_parameters():
        if name.partition(".")[0] not in (*inner, outer):
            raise NotImplementedError(f"its {name} {list(parameter.shape)} is in none of its projections")
    plan.add(path, _input(inner, sequence_parallel))
    for name in inner:
        style = FusedColwiseParallel(parts=2 if name == "gate_up_proj" else 1)
        _plan_linear(plan, _join(path, name), module.get_submodule(name), style)
    _plan_linear(plan, _join(path, outer), module.get_submodule(outer), _row_style(sequence_parallel))


def _row_style(sequence_parallel: bool) -> FusedRowwiseParallel:
    return FusedRowwiseParallel(output_layouts=Shard(1) if sequence_parallel else Replicate())


def _linear(module: nn.Module, name: str) -> tuple[int, int]:
    """Return `features` of a child. Raise NotImplementedError if it is no linear layer, so that its parent is kept."""
    try:
        return features(_base(module.get_submodule(name)))
    except (NotImplementedError, ValueError) as error:
        raise NotImplementedError(f"{name}: {error}") from None


def _base(module: nn.Module) -> nn.Module:
    """Return the layer that LoRA adapters wrap, or the module itself if it is no such wrapper.

    Raise NotImplementedError for a wrapper that does more than add lora_B(lora_A(dropout(x))) to the base's output.
    """
    children = dict(module.named_children())
    if "base_layer" not in children:
        return module
    known = {"base_layer", "lora_A", "lora_B"}
    more = [name for name, child in children.items() if name not in known and any(True for _ in child.parameters())]
    more += [name for name, _ in module.named_parameters(recurse=False)]
    more += [f"the variant of adapter {name}" for name in getattr(module, "lora_variant", ())]
    if not known <= children.keys() or more:
        raise NotImplementedError(
            f"its adapters have {', '.join(more) or ', '.join(children)}: expected lora_A and lora_B alone"
        )
    return children["base_layer"]


def _plan_linear(
    plan: Recognised, path: str, module: nn.Module, style: FusedColwiseParallel | FusedRowwiseParallel
) -> None:
    """Add the style of a linear layer, and those that follow for its LoRA adapters."""
    if _base(module) is module:
        plan.add(path, style)
        return
    plan.add(_join(path, "base_layer"), style)
    for name, child in module.named_modules():
        part = _join(path, name)
        kind = name.partition(".")[0]
        if kind == "lora_dropout" and type(child) is nn.Dropout and isinstance(style, FusedRowwiseParallel):
            plan.add(part, FusedSequenceParallel(use_local_output=True))  # so that the ranks' masks differ
        if kind not in ("lora_A", "lora_B") or not any(True for _ in child.parameters(recurse=False)):
            continue
        if isinstance(style, FusedColwiseParallel):
            plan.add(part, ReplicatedParallel() if kind == "lora_A" else style)
        elif kind == "lora_A":
            plan.add(part, FusedRowwiseParallel(output_layouts=style.output_layouts[0]))
        else:
            plan.add(part, ReplicatedParallel(sum_gradients=isinstance(style.output_layouts[0], Shard)))


def _plan_attention(
    plan: Recognised,
    path: str,
    module: nn.Module,
    inner: tuple[str, ...],
    outer: str,
    ranks: int,
    length: SequenceLength | None,
) -> None:
    heads, shared, size = _heads(module, inner, outer)
    if heads % ranks:
        raise ValueError(
            f"{path}: {heads} heads cannot be divided among {ranks} ranks: expected tp {splits(heads, heads)}"
        )
    local = heads // ranks
    served = [served_heads(heads, shared, rank, ranks) for rank in range(ranks)]
    sharded, own_keys = shared % ranks == 0, len(served[0])
    of_rank = {
        "num_heads": local, "num_attention_heads": local, "split_size": local * size, "num_key_value_heads": own_keys,
        "num_key_value_groups": heads // shared if sharded else local // own_keys,
    }  # fmt: skip
    attributes: dict[str, Any] = {name: value for name, value in of_rank.items() if hasattr(module, name)}
    styles = dict.fromkeys(inner, FusedColwiseParallel())
    if inner == ("qkv_proj",):
        attributes["config"] = LocalHeads(module.config, num_attention_heads=local, num_key_value_heads=own_keys)
    if inner == ("c_attn",) or (inner == ("qkv_proj",) and heads == shared):
        styles = dict.fromkeys(inner, FusedColwiseParallel(parts=3))
    elif inner == ("qkv_proj",):
        ranges = [_packed_ranges(heads, shared, size, served[rank], rank, ranks) for rank in range(ranks)]
        styles = dict.fromkeys(inner, FusedColwiseParallel(ranges=ranges))
    elif len(inner) == 3 and not sharded:
        rows = [tuple((head * size, (head + 1) * size) for head in each) for each in served]
        styles |= dict.fromkeys(inner[1:], FusedColwiseParallel(ranges=rows))
    for name, style in styles.items():
        _plan_linear(plan, _join(path, name), module.get_submodule(name), style)
    _plan_linear(plan, _join(path, outer), module.get_submodule(outer), _row_style(length is not None))
    plan.add(path, _input(inner, length is not None, length, **attributes))
    if any(True for _ in module.parameters(recurse=False)):
        plan.add(path, ReplicatedParallel(sharded=_OF_HEADS))
    for name, child in module.named_children():
        if name not in (*inner, outer) and any(True for _ in child.parameters()):
            plan.add(_join(path, name), ReplicatedParallel(sum_gradients=True))


def _packed_ranges(heads: int, shared: int, size: int, served: list[int], rank: int, ranks: int) -> Ranges:
    """Return the rows of this rank's q, k and v heads in a weight that packs all q, all k and all v heads."""
    local = heads // ranks
    queries = (rank * local * size, (rank + 1) * local * size)
    keys = tuple(((heads + head) * size, (heads + head + 1) * size) for head in served)
    values = tuple((start + shared * size, stop + shared * size) for start, stop in keys)
    return (queries, *keys, *values)


def served_heads(heads: int, shared: int, rank: int, ranks: int) -> list[int]:
    """Return the key/value heads that a rank needs for its query heads, each used by equally many of them.

    heads, shared: the numbers of all query heads and of all key/value heads; query head h uses key/value head
    h // (heads / shared). If a rank's query heads use theirs unequally often, a key/value head is repeated.
    """
    local = heads // ranks
    used = [head // (heads // shared) for head in range(rank * local, (rank + 1) * local)]
    runs = max(
        run for run in range(1, local + 1)
        if local % run == 0 and all(
            len({owner // (heads // shared) for owner in range(first, first + run)}) == 1
            for start in range(0, heads, local) for first in range(start, start + local, run)
        )
    )  # fmt: skip
    return used[::runs]


def _heads(module: nn.Module, inner: tuple[str, ...], outer: str) -> tuple[int, int, int]:
    """Return (query heads, key/value heads, head size) of an attention module.

    Raise NotImplementedError if its sizes contradict each other, for norms over all heads together, and for parameters
    that the plan cannot share among the heads.
    """
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if not isinstance(size, int):
        raise NotImplementedError("it has no head_dim or head_size")
    for name in (*inner, outer):
        _linear(module, name)
    heads = _linear(module, outer)[0] // size
    widths = [_linear(module, name)[1] // size for name in inner]
    shared = widths[1] if len(inner) == 3 else (widths[0] - heads) // 2
    if heads < 1 or shared < 1 or heads % shared or sum(widths) != heads + 2 * shared:
        raise NotImplementedError(f"{heads} query heads and {shared} key/value heads do not fit its projections")
    for name, child in module.named_children():
        for parameter in child.parameters() if name not in (*inner, outer) else ():
            if parameter.numel() != size:
                raise NotImplementedError(
                    f"{name} has {parameter.numel()} parameters: expected {size}, those of a head"
                )
    for name, parameter in module.named_parameters(recurse=False):
        if name not in _OF_HEADS or parameter.shape != (heads,):
            raise NotImplementedError(
                f"its own parameter {name} {list(parameter.shape)} is not known: expected {' or '.join(_OF_HEADS)}"
                f" [{heads}], with an entry for each head"
            )
    return heads, shared, size


class LocalHeads:
    """A model's configuration as an attention module of one rank reads it: with other numbers of heads."""

    def __init__(self, config: Any, **values: int) -> None:
        self.__dict__.update(config=config, values=values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "values" not in self.__dict__:
            raise AttributeError(name)
        return self.values[name] if name in self.values else getattr(self.config, name)
