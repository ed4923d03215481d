"""The plan of `parallelize(plan="auto")`: recognises transformers by the structure of their modules.

A decoder is a ModuleList of layers, one or more with an attention or mixer that is known, between an embedding and a
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

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.drop_in.converted import LocalConfig, Ranges
from tpfuse.drop_in.experts import IMPLEMENTATIONS, ExpertShards, expert_shards
from tpfuse.drop_in.heads import Sections, section_ranges, served_heads
from tpfuse.drop_in.mixers import Mixer, is_mixer, mixer_of
from tpfuse.drop_in.proof import Proof
from tpfuse.drop_in.sequence_hooks import SequenceLength
from tpfuse.drop_in.styles import (
    FusedColwiseParallel,
    FusedPrepareModuleInput,
    FusedRowwiseParallel,
    FusedSequenceParallel,
    ReplicatedParallel,
    ShardedExpertsParallel,
    WholeSequences,
    cannot_split,
    features,
)
from tpfuse.layers.sequence import splits

# (the projections in, the possible names of the projection out)
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "dense", "out_proj")),  # Llama, Mistral, Qwen, Gemma; Phi
    (("qkv_proj",), ("o_proj",)),  # Phi-3: all of q, then k, then v
    (("c_attn",), ("c_proj",)),  # GPT-2: all of q, then k, then v
    (("query_key_value",), ("dense",)),  # GPT-NeoX, Falcon: the queries of a key head, then k and v, head by head
    (("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"), ("o_proj",)),  # DeepSeek V3
    (("q_proj", "kv_a_proj_with_mqa", "kv_b_proj"), ("o_proj",)),  # DeepSeek V2 Lite
)
# Of latent attention: the projections to what all heads share, and those from it to the heads.
_TO_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
_FROM_LATENTS = ("q_b_proj", "kv_b_proj")
_MLP = (
    (("gate_proj", "up_proj"), ("down_proj",)),  # Llama, Mistral, Qwen, Gemma
    (("gate_up_proj",), ("down_proj",)),  # Phi-3: all of gate, then up
    (("up_proj",), ("down_proj",)),  # Apertus, Arcee, Nemotron
    (("w1", "w3"), ("w2",)),  # LFM2
    (("input_linear",), ("output_linear",)),  # shared experts of Granite: all of gate, then up
    (("c_fc",), ("c_proj",)),  # GPT-2
    (("fc_in",), ("fc_out",)),  # GPT-J
    (("fc1",), ("fc2",)),  # Phi; Moshi: all of gate, then up
    (("dense_h_to_4h",), ("dense_4h_to_h",)),  # GPT-NeoX
)
LAST_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "embedding_norm", "norm_f")
TOKEN_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "embeddings")
_LENGTHS = ("position_ids",)  # arguments of attention whose last dimension is that of the whole sequence
HEADS = ("lm_head", "embed_out")


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
    """Return (paths of the projections in, path of the projection out) in a module; None if it does not match."""
    children = dict(module.named_children())
    for inner, outer in table:
        last = next((name for name in outer if name in children), None)
        if last is not None and all(name in children for name in inner):
            return tuple(_linear_path(module, name) for name in inner), _linear_path(module, last)
    return None


def _linear_path(module: nn.Module, name: str) -> str:
    """Return the path of the linear layer that a child is, or that is all it holds, as in MoshiLinear."""
    child = module.get_submodule(name)
    held = [inner for inner, _ in child.named_children()]
    return _linear_path(module, f"{name}.{held[0]}") if len(held) == 1 and not child._parameters else name


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
                _match(part, _ATTENTION) or is_mixer(part) for layer in layers for _, part in _parts(layer)
            ):
                yield name, module, child


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of a layer's children, and of what lists among them hold, as LongCat's two attentions."""
    for name, child in layer.named_children():
        listed = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
        yield from ((_join(name, place), part) for place, part in listed)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model's decoder. Raise ValueError if it has none with an attention that is known."""
    for _, decoder, layers in decoders(model):
        found = getattr(decoder, layers)
        assert isinstance(found, nn.ModuleList)
        return found
    raise ValueError(_nothing_found(model))


def has_latents(model: nn.Module) -> bool:
    """Return whether projections of attention in a model give what all heads share."""
    return any(name.rpartition(".")[2] in _TO_LATENTS for name, _ in model.named_modules())


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
    if sequence_parallel and any(True for _ in layer.parameters(recurse=False)):
        plan.add(name, ReplicatedParallel(sum_gradients=True))  # of this rank's tokens
    for child, module in _parts(layer):
        path, part = _join(name, child), Recognised()
        if type(module) is nn.Dropout and sequence_parallel:
            plan.add(path, FusedSequenceParallel(use_local_output=True))
        attention, mlp = _match(module, _ATTENTION), _match(module, _MLP)
        try:
            mixer = mixer_of(module)
            if mixer is not None:
                _plan_mixer(part, path, module, mixer, proof, length)
            elif attention is not None:
                _plan_attention(part, path, module, *attention, proof, length)
            elif mlp is not None:
                _plan_mlp(part, path, module, *mlp, proof, sequence_parallel)
            if mixer or attention or mlp:
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
            if not _plan_mixture(plan, path, module, proof):
                plan.kept.setdefault(path, _unknown(module))
            plan.add(path, ReplicatedParallel())
            if sequence_parallel:
                plan.add(path, WholeSequences(length_arguments=_LENGTHS, length=length))
            if name not in plan.styles and not proof.calls(path):
                plan.add(name, ReplicatedParallel())  # so that the layer's forward meets plain weights
    return plan


def _input(
    projections: tuple[str, ...],
    sequence_parallel: bool,
    length: SequenceLength | None = None,
    sum_gradients: bool = False,
    **attributes: Any,
) -> FusedPrepareModuleInput:
    return FusedPrepareModuleInput(
        input_layouts=Shard(1) if sequence_parallel else Replicate(),
        desired_input_layouts=Replicate(),
        use_local_output=True,
        projections=projections,
        length_arguments=_LENGTHS,
        attributes=attributes,
        length=length,
        sum_gradients=sum_gradients,
    )


def _plan_mlp(
    plan: Recognised,
    path: str,
    module: nn.Module,
    inner: tuple[str, ...],
    outer: str,
    proof: Proof,
    sequence_parallel: bool,
) -> None:
    width, _ = _linear(module, outer)
    for name in inner:
        parts = max(1, _linear(module, name)[1] // width)  # matrices that are packed: gate and up
        _plan_linear(plan, _join(path, name), module.get_submodule(name), FusedColwiseParallel(parts=parts))
    _plan_linear(plan, _join(path, outer), module.get_submodule(outer), _row_style(sequence_parallel))
    more = _plan_others(plan, path, module, (*inner, outer), {width}, 1, proof)
    plan.add(path, _input((*inner, *more), sequence_parallel))


def _plan_others(
    plan: Recognised,
    path: str,
    module: nn.Module,
    projections: tuple[str, ...],
    heads: set[int],
    size: int,
    proof: Proof,
    **own_style: Any,
) -> list[str]:
    """Add the styles of what a block has beside its projections. Return the linears of it that read the block's input.

    own_style: what else the style of the block itself is given.

    heads: the numbers of heads that the ranks divide, of `size` features. A parameter with an entry for each of them,
    or the weight of a norm over all their features, is sharded with them. The block's other own parameters are whole,
    and the gradients of those in its modules are summed.

    Raise NotImplementedError for a linear that gives no features of heads, such as a gate's, or reads something else
    than the input or the features of heads.
    """
    own = {name: parameter.shape for name, parameter in module.named_parameters(recurse=False)}
    if own or own_style:
        sharded = [name for name, shape in own.items() if {*shape[:1]} & heads]
        plan.add(path, ReplicatedParallel(sharded=sharded, **own_style))
    reading, planned, features_of_heads = list[str](), [*projections], {each * size for each in heads}
    for name, part in module.named_modules():
        if not name or any(f"{name}.".startswith(f"{each}.") for each in planned):
            continue
        shapes = {each: x.shape for each, x in part.named_parameters(recurse=False)}
        if isinstance(_base(part), nn.Linear):
            planned.append(name)
            taken, given = _linear(module, name)
            reads = proof.reads_input(path, name)
            if all(given % each for each in heads) or not (reads or taken in features_of_heads):
                raise NotImplementedError(f"{name} maps {taken} to {given} features: expected those of heads")
            reading += [name] if reads else []
            of_input = Replicate() if reads else Shard(-1)
            _plan_linear(plan, _join(path, name), part, FusedColwiseParallel(input_layouts=of_input))
        elif shapes:
            lengths = {each: heads if len(shape) > 1 else features_of_heads for each, shape in shapes.items()}
            sharded = [each for each, shape in shapes.items() if {*shape[:1]} & lengths[each]]
            plan.add(_join(path, name), ReplicatedParallel(sum_gradients=not sharded, sharded=sharded))
    return reading


def _plan_mixture(plan: Recognised, path: str, module: nn.Module, proof: Proof) -> bool:
    """Add the styles of the experts in a module, and of MLPs beside them. Return whether it has experts.

    They take whole sequences and return them. Experts are a module with stacked weights, or a list of MLPs. What else
    is in the module runs as it is on every rank, such as its router.
    """
    parts = dict(module.named_modules())
    stacked = {name: ways for name, part in parts.items() if (ways := list(expert_shards(part)))}
    lists = [name for name, part in parts.items() if isinstance(part, nn.ModuleList)]
    mlps = {name: match for name, part in parts.items() if (match := _match(part, _MLP)) and name}
    if not stacked and not any(name.rpartition(".")[0] in lists for name in mlps):
        return False
    for name in (*stacked, *mlps):
        inner = _join(path, name)
        try:
            if name in stacked:
                plan.add(inner, _experts_style(inner, parts[name], stacked[name], proof))
                continue
            part = Recognised()
            _plan_mlp(part, inner, parts[name], *mlps[name], proof, False)
            proof.block(inner, part.styles, False)
            plan.join(part)
        except NotImplementedError as reason:
            plan.kept[inner] = str(reason)
    for name, child in module.named_children():  # other than a router, which has one product
        known = any(each == name or each.startswith(f"{name}.") for each in (*stacked, *mlps))
        if not known and sum(isinstance(part, nn.Linear) for part in child.modules()) > 1:
            plan.kept[_join(path, name)] = _unknown(child)
    return True


def _unknown(module: nn.Module) -> str:
    return f"{type(module).__name__} is no attention or MLP that tpfuse knows"


def _experts_style(path: str, experts: nn.Module, ways: list[ExpertShards], proof: Proof) -> ShardedExpertsParallel:
    """Return the style of experts, of the first way that is proved. Raise NotImplementedError if none is."""
    inner, ranks = ways[0].inner, proof.ranks
    if path.endswith(".base_layer"):
        raise NotImplementedError("its stacked weights have adapters: expected adapters of linear layers alone")
    if inner % ranks:
        raise NotImplementedError(cannot_split(inner, "inner", ranks))
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"experts_implementation {implementation!r} was not tried: expected"
            f" {', '.join(filter(None, IMPLEMENTATIONS))}"
        )
    reasons = []
    for shards in ways:
        try:
            proof.experts(path, shards)
            return ShardedExpertsParallel(shards)
        except NotImplementedError as reason:
            reasons.append(reason)
    raise reasons[0]


def _row_style(sequence_parallel: bool) -> FusedRowwiseParallel:
    return FusedRowwiseParallel(output_layouts=Shard(1) if sequence_parallel else Replicate(), pads=sequence_parallel)


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
            plan.add(part, ReplicatedParallel(sum_gradients=not style.sum_input) if kind == "lora_A" else style)
        elif kind == "lora_A":
            plan.add(part, FusedRowwiseParallel(output_layouts=style.output_layouts[0], pads=style.pads))
        else:
            plan.add(part, ReplicatedParallel(sum_gradients=isinstance(style.output_layouts[0], Shard)))


def _plan_attention(
    plan: Recognised,
    path: str,
    module: nn.Module,
    inner: tuple[str, ...],
    outer: str,
    proof: Proof,
    length: SequenceLength | None,
) -> None:
    (heads, shared, size), ranks = _heads(module, inner, outer), proof.ranks
    if heads % ranks:
        raise ValueError(
            f"{path}: {heads} heads cannot be divided among {ranks} ranks: expected tp {splits(heads, heads)}"
        )
    local = heads // ranks
    served = [served_heads(heads, shared, rank, ranks) for rank in range(ranks)]
    sharded, own_keys = shared % ranks == 0, len(served[0])
    of_rank = {
        "num_heads": local, "num_attention_heads": local, "split_size": local * size, "num_key_value_heads": own_keys,
        "num_kv_heads": own_keys, "num_key_value_groups": heads // shared if sharded else local // own_keys,
    }  # fmt: skip
    attributes: dict[str, Any] = {name: value for name, value in of_rank.items() if hasattr(module, name)}
    if inner == ("qkv_proj",):
        attributes["config"] = LocalConfig(module.config, num_attention_heads=local, num_key_value_heads=own_keys)
    for name, style in _projection_styles(module, inner, heads, shared, size, served).items():
        _plan_linear(plan, _join(path, name), module.get_submodule(name), style)
    _plan_linear(plan, _join(path, outer), module.get_submodule(outer), _row_style(length is not None))
    if not sharded:
        _check_undivided(module, (*inner, outer), shared, size, ranks)
    divided = {heads, shared} if sharded else {heads}
    gates = _plan_others(plan, path, module, (*inner, outer), divided, size, proof)
    reading = (name for name in inner if name not in _FROM_LATENTS)
    plan.add(path, _input((*reading, *gates), length is not None, length, **attributes))


def _plan_mixer(
    plan: Recognised, path: str, module: nn.Module, mixer: Mixer, proof: Proof, length: SequenceLength | None
) -> None:
    ranks, (width, _) = proof.ranks, _linear(module, mixer.outer)
    if mixer.units % ranks or width != mixer.heads * mixer.size:
        raise NotImplementedError(
            f"{width} features of {mixer.units} heads cannot be divided among {ranks} ranks: expected tp"
            f" {splits(mixer.units, max(ranks, 8))}"
        )
    attributes, tensors = dict[str, Any](), {"": dict[str, tuple[int, list[Ranges]]]()}
    for name, sections in mixer.sections.items():
        ranges, rows = mixer.ranges(name, ranks), sum(heads * size for heads, size in sections)
        owner, _, own = name.rpartition(".")
        part: Any = module.get_submodule(owner)
        if name == mixer.conv:
            tensors[name] = {each: (0, ranges) for each, _ in module.get_submodule(name).named_parameters()}
        elif not sections:
            for each, child in module.get_submodule(name).named_modules():  # of an adapter, its parts
                if any(True for _ in child.parameters(recurse=False)):
                    plan.add(_join(path, name, each), ReplicatedParallel(sum_gradients=True))
        elif own in part._modules:
            _, given = _linear(module, name)
            if given != rows:
                raise NotImplementedError(f"{name} gives {given} features: expected {rows} of its heads")
            _plan_linear(plan, _join(path, name), module.get_submodule(name), _rows_style(sections, ranges))
        elif isinstance(held := getattr(part, own), Tensor):
            if rows not in held.shape:
                raise NotImplementedError(f"{name} is {list(held.shape)}: expected {rows} rows of its heads")
            tensors.setdefault(owner, {})[own] = held.shape.index(rows), ranges
        else:
            attributes[name] = sum(stop - start for start, stop in ranges[0])
    buffers = tensors.pop("")
    for name, of_heads in tensors.items():
        plan.add(_join(path, name), ReplicatedParallel(ranges=of_heads))
    _plan_linear(plan, _join(path, mixer.outer), module.get_submodule(mixer.outer), _row_style(length is not None))
    known = (*mixer.sections, *tensors, mixer.outer)
    for name, child in module.named_children():  # a norm of groups of heads, a gate
        shared = {each: x for each, x in attributes.items() if vars(child).get(each) == vars(module)[each]}
        if shared:
            plan.add(_join(path, name), _input((), False, **shared))
    _plan_others(plan, path, module, known, {mixer.heads}, mixer.size, proof, ranges=buffers, evaluates=True)
    plan.add(path, _input((), length is not None, length, sum_gradients=True, **attributes))


def _rows_style(sections: Sections, ranges: Sequence[Ranges]) -> FusedColwiseParallel:
    """Return the style of a projection in of a mixer, which reads an input whose gradient is summed before."""
    divided = all(heads % len(ranges) == 0 for heads, _ in sections)
    if divided and len(set(sections)) == 1:  # the ranks' rows of equal sections, which a DTensor has
        return FusedColwiseParallel(parts=len(sections), sum_input=False)
    return FusedColwiseParallel(ranges=ranges, gather_weight=True, sum_input=False)


def _projection_styles(
    module: nn.Module, inner: tuple[str, ...], heads: int, shared: int, size: int, served: Sequence[list[int]]
) -> dict[str, FusedColwiseParallel]:
    """Return the styles of an attention's projections in, by name. served: as `served_heads` returns, of each rank."""
    ranks, styles = len(served), dict.fromkeys(inner, FusedColwiseParallel())
    local, sharded = heads // ranks, shared % ranks == 0
    if inner == ("c_attn",) or (inner == ("qkv_proj",) and heads == shared):
        return dict.fromkeys(inner, FusedColwiseParallel(parts=3))
    if inner == ("qkv_proj",):
        packed = (heads, size), (shared, size), (shared, size)
        return dict.fromkeys(inner, FusedColwiseParallel(ranges=section_ranges(packed, heads, ranks)))
    if inner == ("query_key_value",) and not sharded:
        ranges = [_grouped_ranges(heads // shared, size, served[rank], rank * local, local) for rank in range(ranks)]
        return dict.fromkeys(inner, FusedColwiseParallel(ranges=ranges))
    if len(inner) == 3 and not sharded:
        ranges = section_ranges(((shared, size),), heads, ranks)
        styles |= dict.fromkeys(inner[1:], FusedColwiseParallel(ranges=ranges))
    for name in styles.keys() & {*_TO_LATENTS}:  # whole on every rank, whose heads give a part of the gradient
        styles[name] = FusedColwiseParallel(ranges=[((0, _linear(module, name)[1]),)] * ranks)
    return styles | dict.fromkeys(styles.keys() & {*_FROM_LATENTS}, FusedColwiseParallel(sum_input=False))


def _check_undivided(module: nn.Module, projections: tuple[str, ...], shared: int, size: int, ranks: int) -> None:
    """Raise NotImplementedError for a parameter beside the projections that key/value heads have, which ranks share."""
    for name, parameter in module.named_parameters():
        own = not any(name.startswith(f"{each}.") for each in projections)
        entries = shared * size if "." in name and parameter.ndim < 2 else shared
        if own and parameter.shape[:1] == (entries,):
            raise NotImplementedError(
                f"{name} {list(parameter.shape)} is of {shared} key/value heads, which {ranks} ranks do not divide:"
                f" expected tp {splits(shared, shared)}"
            )


def _grouped_ranges(group: int, size: int, served: list[int], first: int, local: int) -> Ranges:
    """Return the rows of this rank's heads in a weight that packs the queries of a key head, then that and its values.

    group: the query heads of a key head. first, local: the first query head of this rank, and how many it has.
    """
    rows, run = list[tuple[int, int]](), local // len(served)
    for query, head in zip(range(first, first + local, run), served, strict=True):
        keys = (head + 1) * group + 2 * head
        rows += [(query + 2 * head, query + 2 * head + run), (keys, keys + 2)]
    return tuple((start * size, stop * size) for start, stop in rows)


def _heads(module: nn.Module, inner: tuple[str, ...], outer: str) -> tuple[int, int, int]:
    """Return (query heads, key/value heads, head size) of an attention module. With latents the size is that of values.

    Raise NotImplementedError if its sizes contradict each other. A projection of its own may give several features for
    each of the queries': a gate beside them.
    """
    latents = any(name in _FROM_LATENTS for name in inner)
    sizes = ("v_head_dim",) if latents else ("head_dim", "head_size")
    size = next((getattr(module, each) for each in sizes if getattr(module, each, None)), None)
    if not isinstance(size, int):
        raise NotImplementedError(f"it has no {' or '.join(sizes)}")
    for name in (*inner, outer):
        _linear(module, name)
    heads = _linear(module, outer)[0] // size
    widths = [_linear(module, name)[1] // size for name in inner]
    if latents:
        shared, fits = heads, True
    elif len(inner) == 3:
        shared, fits = widths[1], heads > 0 and widths[0] % heads == 0 and widths[1] == widths[2]
    else:
        shared, fits = (widths[0] - heads) // 2, (widths[0] - heads) % 2 == 0
    if not fits or heads < 1 or shared < 1 or heads % shared:
        raise NotImplementedError(f"{heads} query heads and {shared} key/value heads do not fit its projections")
    return heads, shared, size
