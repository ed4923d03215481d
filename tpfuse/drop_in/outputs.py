"""Outputs of a parallelized model, as its caller reads them: whole hidden states, and logits that no rank has.

Between the layers of a decoder pass shards of the sequence, and its forward, or transformers' hooks of the layers, put
them into the output as they are. `WholeStates` gathers them there, and only them, so a pass
that returns none costs no communication.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.drop_in.sequence_hooks import PreparedInput, SequenceLength, called
from tpfuse.drop_in.shards import gather_sequence
from tpfuse.drop_in.sketch import mapped, tensors_in
from tpfuse.drop_in.structure import decoders


@dataclass(eq=False)
class WholeStates:
    """A hook of a decoder that gathers the states in its output, shards [batch, a rank's tokens, width] of `length`.

    The gradient of a whole state, which all ranks compute, returns to the shards: each rank keeps its own part. The
    first tensor of an output is the decoder's own result, which is whole.
    """

    mesh: DeviceMesh
    length: SequenceLength

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Return the output with whole states."""
        if hasattr(out, "to_tuple"):  # transformers' ModelOutput, whose entries have names
            if out.get("hidden_states") is not None:
                out["hidden_states"] = mapped(partial(self.whole, module), out["hidden_states"])
            return out
        first = next(tensors_in(out), None)
        return mapped(lambda x: x if x is first else self.whole(module, x), out)

    def whole(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the whole of x, if it has the shape of a shard; the caller is a hook of the module."""
        ranks = self.mesh.size()
        length = self.length.of_pass(called(module), x.shape[1], ranks) if x.ndim == 3 else None
        if length is None or x.shape[1] != -(-length // ranks):
            return x
        if length == 1 and x.requires_grad:  # one that is whole already has the same shape
            raise ValueError(
                f"{called(module)}: hidden states of 1 token have no gradients with sequence parallelism: expected 2"
                " tokens or more, torch.no_grad(), or sequence_parallel=False"
            )
        return gather_sequence(x, 1, self.mesh.get_group(), length)


def whole_states(model: nn.Module) -> dict[nn.Module, WholeStates]:
    """Return hooks for the decoders of a converted model whose layers pass shards of the sequence."""
    hooks = {}
    for _, decoder, layers in decoders(model):
        first: Any = decoder.get_submodule(f"{layers}.0")
        for hook in first._forward_pre_hooks.values():
            if isinstance(hook, PreparedInput) and hook.wanted is not None and hook.length is not None:
                hooks[decoder] = WholeStates(hook.mesh, hook.length)
    return {decoder: hook for decoder, hook in hooks.items() if hook.mesh.size() > 1}


_NO_LOGITS = (
    "logits: with labels in training, no rank has whole ones, since the loss is computed from slices of them: call the"
    " model without labels, or in eval()"
)


class NoLogits:
    """Stands in the output for the logits of a training step, which no rank computes whole.

    Whoever computes with them gets an error that says how to have them: AttributeError for attributes and methods,
    which accelerate asks for, and otherwise ValueError.
    """

    def __repr__(self) -> str:
        return "<no logits in training with labels>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_NO_LOGITS)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(_NO_LOGITS)


for _name in (
    "__torch_function__", "__array__", "__getitem__", "__iter__", "__len__", "__bool__", "__float__", "__neg__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__matmul__",
    "__lt__", "__gt__", "__le__", "__ge__",
):  # fmt: skip
    setattr(NoLogits, _name, _refuse)
NO_LOGITS = NoLogits()
