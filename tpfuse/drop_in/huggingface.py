"""Hugging Face's transformers: its models, their weights, and its attention interfaces.

This is the one module that knows transformers; it imports it inside functions, when a model of it is converted.
"""

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.drop_in import context_proof, kept_activations
from tpfuse.drop_in.causal_loss import causal_loss
from tpfuse.drop_in.context_gradients import ContextMean
from tpfuse.drop_in.context_hooks import (
    append_last_position,
    drop_last_position,
    frequencies_depend_on_length,
    give_all_heads,
    give_whole_layers,
    take_mask,
)
from tpfuse.drop_in.conversion import own_class
from tpfuse.drop_in.converted import ConvertedColumnLinear
from tpfuse.drop_in.decoder_stages import DecoderStages
from tpfuse.drop_in.layer_hooks import show_shards, show_whole
from tpfuse.drop_in.loss_proof import prove_loss
from tpfuse.drop_in.outputs import whole_states
from tpfuse.drop_in.parallel_forward import ATTENTION, ParallelForward
from tpfuse.drop_in.sharded_tokens import ShardedTokens, sharded_tokens
from tpfuse.drop_in.structure import decoders
from tpfuse.drop_in.styles import PLAN_STYLES
from tpfuse.parallel.context import ContextParallel
from tpfuse.parallel.pipeline.cut import Stage

_RELEASE = (5, 24)  # the oldest release of transformers whose plans and conversions of weights are these
# Methods of transformers' and PEFT's models that read or replace whole weights, or add layers of their sizes.
_CHANGES = ("resize_token_embeddings", "merge_and_unload", "merge_adapter", "add_adapter")


def outermost(model: nn.Module) -> nn.Module | None:
    """Return `model` if it is a PreTrainedModel of transformers, or the first one in it: PEFT wraps models."""
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils":
                return module
    return None


def check_release() -> None:
    """Raise ValueError unless the release of transformers that is installed is one that tpfuse knows."""
    try:
        from transformers import __version__
    except ImportError:
        raise ValueError("transformers is not installed: pip install transformers") from None
    if tuple(int(number) for number in re.findall(r"\d+", __version__)[:2]) < _RELEASE:
        expected = ".".join(map(str, _RELEASE))
        way = f"expected {expected} or newer: pip install --upgrade transformers"
        raise ValueError(f"transformers {__version__} is installed: {way}")


def configuration(settings: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model with this config.json. Raise ValueError if it cannot be used."""
    check_release()
    from transformers import CONFIG_MAPPING

    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"model_type is {kind!r}: expected a model that transformers knows")
    try:
        decoded = CONFIG_MAPPING[kind]._decode_special_floats(dict(settings))  # infinities, as from_pretrained does
        return CONFIG_MAPPING[kind].from_dict(decoded)
    except Exception as error:  # each class checks its values in a way of its own
        raise ValueError(f"transformers refuses the configuration: {' '.join(str(error).split())[:200]}") from error


def causal_model(settings: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return a causal language model with this config.json and random weights. Raise ValueError if there is none."""
    config = configuration(settings)
    from transformers import AutoModelForCausalLM

    if dtype is torch.float64:
        config._experts_implementation = "eager"  # torch's grouped product has no float64
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except Exception as error:  # a wrong size may fail anywhere in the model
        raise ValueError(f"transformers cannot make the model: {' '.join(str(error).split())[:200]}") from error


def conversions(whole: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return transformers' (renamings, other conversions) of the tensors in a model's files."""
    model: Any = outermost(whole)
    if model is None:
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms: list[Any] = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    return [each for each in transforms if each not in converters], converters


def without_ignored(whole: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those names of tensors in files, unknown to the model, that transformers does not ignore.

    It tells nobody of the frequencies and positions that its older releases stored, and of what a model's class names.
    """
    model: Any = outermost(whole)
    loaded = SimpleNamespace(unexpected_keys=set(names), missing_keys=set())
    if model is not None:
        model._adjust_missing_and_unexpected_keys(loaded)
    return sorted(loaded.unexpected_keys)


def replace_forward(model: nn.Module, logits: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return the model, whose forward is from now on `logits`, so that `generate` works without its parameters.

    logits: returns [batch, vocabulary], those of the last token, for ids [batch, tokens].
    """
    from transformers.modeling_outputs import CausalLMOutput

    @wraps(model.forward)
    def forward(input_ids: Tensor, **_: Any) -> Any:
        return CausalLMOutput(logits=logits(input_ids).unsqueeze(1))

    model.forward = forward
    return model


def quiet() -> None:
    """Silence the warnings and the progress bars of transformers in this process: commands print what users need."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def register() -> None:
    """Register attn_implementation="tpfuse_ring" and the styles of `tp_plan` with transformers.

    `tpfuse.parallelize` calls this; call it yourself before `from_pretrained` is given one of these names. Outside of
    context parallelism the attention is transformers' "sdpa". Raise ValueError for an older release of transformers.
    """
    check_release()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.distributed.parallel_utils import ParallelInterface

    for name, attention, mask in (
        (ATTENTION, _attention, _mask),
        (context_proof.PROOF, context_proof.attention, context_proof.mask),
    ):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(kept_activations.COUNTED, kept_activations.attention)  # without a mask
    for name, style in PLAN_STYLES.items():
        ParallelInterface.register(name, style)  # type: ignore[arg-type]


def cut(model: nn.Module, stages: Sequence[Stage]) -> DecoderStages:
    """Keep of a model, which `adapt` has been given, what `stages` need, those of this rank of a pipeline, in place.

    The model is then called as a module, with the arguments stage and stage_input (`ParallelForward`). Raise ValueError
    for a model that a pipeline cannot cut.
    """
    forward = model.__dict__["forward"]
    assert isinstance(forward, ParallelForward)
    forward.stages = DecoderStages(model, stages)
    return forward.stages


def check_context(whole: nn.Module, context: ContextParallel, tensor_ranks: int) -> None:
    """Raise ValueError if `whole`, or the model in it, cannot be sharded over a context."""
    model = outermost(whole)
    if model is None:
        raise ValueError(
            f"context parallelism: the model is a {type(whole).__name__}: expected a decoder of transformers;"
            " other models call tpfuse.ring_attention themselves"
        )
    config: Any = model.config
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"context parallelism: {type(model).__name__} does not use transformers' AttentionInterface")
    if not _is_base(model) and not _has_causal_loss(model):
        raise ValueError(f"context parallelism: {type(model).__name__} is no base model and no causal language model")
    if "position_ids" not in inspect.signature(model.forward).parameters or not getattr(config, "is_causal", True):
        raise ValueError(f"context parallelism: {type(model).__name__} is no causal decoder with position_ids")
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(
            f"context parallelism: the configuration of {type(model).__name__} has no num_attention_heads: expected a"
            " decoder of text alone"
        )
    context.check(context.size, heads // tensor_ranks)
    register()
    context_proof.prove_context(model)
    if takes_labels(model):
        try:
            prove_loss(model, 1)
        except NotImplementedError as reason:
            raise ValueError(
                f"context parallelism: the loss of {type(model).__name__} cannot be computed from shards of the tokens:"
                f" {reason}; use a mesh without cp"
            ) from None


def _is_base(model: Any) -> bool:
    return model.base_model is model and model.get_output_embeddings() is None


def _has_causal_loss(model: Any) -> bool:
    """Return whether transformers computes the model's loss as that of a causal language model, outside of forward."""
    head = model.get_output_embeddings()
    uses = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    return head is not None and uses and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def takes_labels(model: Any) -> bool:
    """Return whether the model of transformers computes the loss of a causal language model from labels."""
    adapted = model.__dict__.get("_loss_function") is causal_loss
    return adapted or (not _is_base(model) and _has_causal_loss(model))


def whole_logits(whole: nn.Module) -> dict[str, str]:
    """Return why the model in `whole` needs whole logits for its loss, by the name of what computes them; or nothing.

    The model is not converted yet.
    """
    model: Any = outermost(whole)
    if model is None or _is_base(model):
        return {}
    try:
        if not takes_labels(model):
            raise NotImplementedError("its forward has a loss of its own")
        prove_loss(model, 2)
    except NotImplementedError as reason:
        head = model.get_output_embeddings()
        return {name: f"whole logits: {reason}" for name, module in whole.named_modules() if module is head}
    return {}


def adapt(
    whole: nn.Module, context: ContextParallel, tensor_mesh: DeviceMesh | None, sliced: bool, separates: bool = True
) -> None:
    """Replace the forward of `outermost` after its layers have been converted. `release` and `restore_module` undo it.

    context: the ranks that share each sequence; those of one rank share nothing. sliced: whether the loss is computed
    from slices of the logits. separates: over a context, what `separates_documents` returned.
    """
    model, states = outermost(whole), whole_states(whole)
    for decoder, hook in states.items():
        if decoder is not model:
            decoder.register_forward_hook(hook)
    for _, decoder, layers in decoders(whole):
        for layer in decoder.get_submodule(layers).children() if decoder in states or context.groups else ():
            show_whole(layer, states.get(decoder))
    if model is None:
        return
    refuse_plain_trainers()
    their: Any = model
    causal = takes_labels(their)
    head = their.get_output_embeddings() if causal and sliced else None
    sharded = isinstance(head, ConvertedColumnLinear) and head.gather_output and head.group is not None
    attention = their.config._attn_implementation
    forward = ParallelForward(
        model, head if sharded else None, context if context.groups else None, tensor_mesh, attention, separates
    )
    forward.states = states.get(model)
    model.__dict__["forward"] = forward
    if callable(getattr(model, "generate", None)):
        model.__dict__["generate"] = forward.generate
    if causal:
        model.__dict__["_loss_function"] = causal_loss  # what transformers' setter of loss_function sets
    if tensor_mesh is not None and their.base_model is not model:
        their.base_model.register_forward_hook(partial(give_all_heads, tensor_mesh))
    if not context.groups:
        return
    model.__dict__["mean_over_context"] = context
    their.set_attn_implementation(ATTENTION)
    if their.base_model is not model:
        their.base_model.register_forward_pre_hook(take_mask, with_kwargs=True)
        their.base_model.register_forward_hook(give_whole_layers)
    for module in filter(frequencies_depend_on_length, model.modules()):
        module.register_forward_pre_hook(append_last_position, with_kwargs=True)
        module.register_forward_hook(drop_last_position)


def release(whole: nn.Module) -> None:
    """Undo what `adapt` and forward passes over a context have changed besides modules' attributes and hooks."""
    for _, decoder, layers in decoders(whole):
        for layer in decoder.get_submodule(layers).children():
            show_shards(layer)
    model: Any = outermost(whole)
    forward = None if model is None else model.__dict__.get("forward")
    if not isinstance(forward, ParallelForward) or forward.context is None:
        return
    model.set_attn_implementation(forward.attention)
    for parameter in model.parameters():
        hooks = parameter._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, ContextMean)]:
            del hooks[key]


def refuse_changes(model: nn.Module) -> None:
    """Make methods that change parameters of whole modules raise ValueError, in a model and in the modules in it."""
    for module in model.modules():
        for name in _CHANGES:
            if callable(getattr(type(module), name, None)):
                module.__dict__[name] = partial(_refuse, name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{name}: the model is parallelized: call {name} before tpfuse.parallelize(model, mesh), or after"
        " tpfuse.restore(model)"
    )


@cache
def refuse_plain_trainers() -> None:
    """Let transformers' Trainer refuse parallelized models that it would train or save wrongly, when it is made.

    It learns so by one of its default callbacks. `tpfuse.ParallelTrainer` marks its models.
    """
    if importlib.util.find_spec("accelerate") is None:  # Trainer needs it
        return
    from transformers import TrainerCallback, trainer

    class RefusePlainTrainers(TrainerCallback):
        """Refuse parallelized models."""

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """Raise ValueError for a parallelized model, unless each rank trains it on its own and saves no state."""
            if "replacements" not in model.__dict__ or "trained_by_all_ranks" in model.__dict__:
                return
            way = "the model is parallelized: use tpfuse.ParallelTrainer"
            if args.world_size > 1:
                raise ValueError(f"Trainer would give the {args.world_size} ranks different batches: {way}")
            if dist.is_initialized() and dist.get_world_size() > 1 and args.save_strategy != "no":
                raise ValueError(
                    f"save_strategy={args.save_strategy.value!r}: Trainer would write the checkpoints of all"
                    f' {dist.get_world_size()} ranks to the same files: {way}, or save_strategy="no"'
                )

    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks.append(RefusePlainTrainers)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Return the attention mask of a forward pass, for transformers' AttentionMaskInterface."""
    tokens = sharded_tokens()
    if tokens is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(*args, **kwargs)
    if kwargs.get("use_vmap"):
        raise ValueError("context parallelism: the model has attention masks of its own: expected causal attention")
    return replace(tokens, window=kwargs.get("local_size"))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (attention [batch, tokens, heads, size], None), for transformers' AttentionInterface.

    query, key, value: [batch, heads, tokens, size]. attention_mask: what `_mask` returned. Raise ValueError, with the
    number of the layer, for what `ring_attention` cannot do.
    """
    layer = f"{own_class(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    sharded = isinstance(attention_mask, ShardedTokens)
    for name in ("head_mask",) if sharded else ("head_mask", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            way = "give the ranks of the context to tp, which shards the heads"
            raise ValueError(f"{layer}: {name} is not supported by attn_implementation={ATTENTION!r}: {way}")
    if not isinstance(attention_mask, ShardedTokens):
        if sharded_tokens() is not None:
            raise ValueError(f"{layer}: context parallelism: the model makes its attention masks by itself")
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if dropout > 0 and attention_mask.dropout_keys is None:
        raise ValueError(f"{layer}: context parallelism: its dropout {dropout} is not that of the configuration")
    dropped = attention_mask.dropout(module.layer_idx, dropout, query) if dropout > 0 else {}
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux"), **dropped}
    width = max(query.shape[-1], value.shape[-1])  # zeros change neither scores nor the other columns of the output
    query, key, padded = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    out = attention_mask.sharded.attention(query, key, padded, window=attention_mask.window, scale=scale, **options)
    out = out[..., : value.shape[-1]].transpose(1, 2).contiguous()
    if attention_mask.unseeing is not None:
        out = out.masked_fill(attention_mask.unseeing[..., None, None], 0)
    return out, None
