"""Hooks of decoders and rotary embeddings whose ranks share heads, or the tokens of a context."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.mesh import group_of
from tpfuse.drop_in.sharded_tokens import ShardedTokens, current, sharded_tokens
from tpfuse.drop_in.shards import gather_sequence
from tpfuse.drop_in.sketch import mapped


def take_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take the mask of all tokens from the arguments of a decoder, which has this rank's tokens."""
    sharded = sharded_tokens() is not None
    return (args, {**kwargs, "attention_mask": None}) if sharded and "attention_mask" in kwargs else None


def give_all_heads(mesh: DeviceMesh | None, module: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return a decoder's output with the probabilities of attention [batch, heads, ...] of all heads.

    An attention that was left alone has all. mesh: the tensor-parallel one. The output is a tuple with
    return_dict=False.
    """

    def whole(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim != 4:
            return x
        has_all = x.shape[1] == module.config.get_text_config().num_attention_heads
        return x if has_all else gather_sequence(x, 1, group_of(mesh), None)

    if type(out) is tuple:
        return tuple(tuple(map(whole, each)) if type(each) is tuple else each for each in out)
    if getattr(out, "attentions", None):
        out["attentions"] = tuple(map(whole, out["attentions"]))
    return out


def give_whole_layers(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """Replace what a decoder's output has of its layers by that of all tokens; the losses of routers follow from it."""
    running = current.now
    if running is not None and running.tokens is not None:
        gather_layers(out, running.tokens)


def gather_layers(out: Any, tokens: ShardedTokens) -> None:
    """Replace hidden states and logits of routers by those of all tokens."""

    def whole(x: Tensor) -> Tensor:
        gathered = tokens.gather(x)
        return gathered if x.ndim > 2 else gathered.flatten(0, 1)

    for name in ("hidden_states", "router_logits"):
        if getattr(out, name, None) is not None:
            out[name] = mapped(whole, out[name])


def frequencies_depend_on_length(module: nn.Module) -> bool:
    """Return whether a rotary embedding has other frequencies for longer sequences."""
    kinds = getattr(module, "rope_type", ())
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(kinds & {"dynamic", "longrope"})


def append_last_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a rotary embedding the largest position of all ranks too, so that its frequencies are equal on all."""
    tokens = sharded_tokens()
    if tokens is None:
        return None
    positions = args[1] if len(args) > 1 else kwargs["position_ids"]
    last = tokens.last_position.expand(positions.shape[0], 1)
    positions = torch.cat([positions, last], dim=1)
    if len(args) > 1:
        return (args[0], positions, *args[2:]), kwargs
    return args, {**kwargs, "position_ids": positions}


def drop_last_position(module: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Return the tables without the position that `append_last_position` has appended."""
    return None if sharded_tokens() is None else tuple(table[:, :-1] for table in out)
