"""Hooks of decoder layers that see whole sequences where the layers compute shards of them.

Readers of features, probes and steering vectors hook the layers of a decoder. A hook of somebody else is wrapped when
it is registered, or when the model is converted: it gets the layer's input and output whole, with the gradients of one
rank, and what it returns is split again. Other layers communicate as before. Hooks of modules inside
of a layer see this rank's shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tpfuse.drop_in.outputs import WholeStates
from tpfuse.drop_in.sequence_hooks import first_argument, with_first_argument
from tpfuse.drop_in.sharded_tokens import ShardedTokens
from tpfuse.drop_in.shards import split_sequence
from tpfuse.drop_in.sketch import first_tensor, with_first_tensor

_REGISTERS = {"_forward_pre_hooks": "register_forward_pre_hook", "_forward_hooks": "register_forward_hook"}
_TOOLS = ("tpfuse.", "torch.", "transformers.")  # their hooks know shards, or read no values


@dataclass(eq=False)
class WholeHook:
    """A layer's forward hook, or forward pre-hook, around that of somebody else, which gets whole sequences.

    states: None if the layer has no shards along the tensor-parallel ranks.
    """

    own: Callable[..., Any]
    with_kwargs: bool
    states: WholeStates | None

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *out: Any) -> Any:
        """Return the output, or the arguments, with what the hook has made of them."""
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, ShardedTokens)), None)
        name, x = first_argument(layer, args, kwargs)
        args, kwargs = with_first_argument(args, kwargs, name, self._whole(layer, x, tokens))
        given: list[Any] = [args, kwargs] if self.with_kwargs else [args]
        if not out:
            found = self.own(layer, *given)
            if found is not None and self.with_kwargs:
                args, kwargs = found
            elif found is not None:
                args = found if isinstance(found, tuple) else (found,)
            name, changed = first_argument(layer, args, kwargs)
            return with_first_argument(args, kwargs, name, self._part(changed, x, tokens))
        if out[0] is None:  # an error: the hook is always called
            return self.own(layer, *given, None)
        y = first_tensor(out[0])
        shown = with_first_tensor(out[0], self._whole(layer, y, tokens))
        found = self.own(layer, *given, shown)
        found = shown if found is None else found
        return with_first_tensor(found, self._part(first_tensor(found), y, tokens))

    def _whole(self, layer: nn.Module, x: Tensor, tokens: ShardedTokens | None) -> Tensor:
        x = x if self.states is None else self.states.whole(layer, x)
        return x if tokens is None else tokens.gather(x)

    def _part(self, x: Tensor, like: Tensor, tokens: ShardedTokens | None) -> Tensor:
        """Return this rank's part of x: `like`, of which x was made, may be a shard or whole."""
        if tokens is not None:
            x = tokens.split(x)
        sharded = self.states is not None and x.shape[1] != like.shape[1]
        return split_sequence(x, 1, self.states.mesh.get_group()) if sharded else x  # type: ignore[union-attr]


def show_whole(layer: nn.Module, states: WholeStates | None) -> None:
    """Let hooks of a layer, those that it has and those that are registered from now on, get whole sequences."""
    for hooks, register in _REGISTERS.items():
        for key, hook in getattr(layer, hooks).items():
            if _is_somebodys(hook):
                options = getattr(layer, f"{hooks}_with_kwargs")
                getattr(layer, hooks)[key] = WholeHook(hook, key in options, states)
                options[key] = True
        layer.__dict__[register] = partial(_register, layer, register, states)


def show_shards(layer: nn.Module) -> None:
    """Undo `show_whole` for the layer's hooks."""
    for hooks in _REGISTERS:
        for key, hook in getattr(layer, hooks).items():
            if isinstance(hook, WholeHook):
                getattr(layer, hooks)[key] = hook.own
                if not hook.with_kwargs:
                    del getattr(layer, f"{hooks}_with_kwargs")[key]


def _register(
    layer: nn.Module, register: str, states: WholeStates | None, hook: Any, *, with_kwargs: bool = False, **options: Any
) -> RemovableHandle:
    if _is_somebodys(hook):
        hook, with_kwargs = WholeHook(hook, with_kwargs, states), True
    handle: RemovableHandle = getattr(type(layer), register)(layer, hook, with_kwargs=with_kwargs, **options)
    return handle


def _is_somebodys(hook: Any) -> bool:
    module = getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""
    return not module.startswith(_TOOLS)
