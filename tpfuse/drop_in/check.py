"""The check of `parallelize(check=True)`: a small step, forward and backward, before and after the conversion."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpfuse.comm import collectives
from tpfuse.comm.collectives import on_any_rank
from tpfuse.comm.layout import gather_whole, has_values, local_tensor
from tpfuse.comm.mesh import groups_of
from tpfuse.drop_in.huggingface import outermost, takes_labels

# The largest difference of two logits, or losses, that counts as rounding, as a share of the largest value.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}


@dataclass
class SmallStep:
    """Results of a model for a few tokens: logits, the loss, and the gradient of each trained parameter by name.

    Gradients are on this rank as autograd returns them; None for a parameter that takes no part.
    """

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor | None]


def small_batch(model: nn.Module, ranks: int) -> dict[str, Tensor]:
    """Return a few tokens, equal on all ranks; their number is not a multiple of `ranks`.

    Raise ValueError for a model without the `config.vocab_size` or the `input_ids` that transformers' models have.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ValueError("check: the model has no config.vocab_size, from which to make tokens: expected check=False")
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        raise ValueError(
            f"check: the forward of {type(model).__name__} takes {', '.join(parameters)}, and no input_ids: expected"
            " check=False"
        )
    length, device = 2 * ranks + 1, next(model.parameters()).device
    ids = (torch.arange(2 * length, device=device) * 7919 % vocabulary).view(2, length)
    inner = outermost(model)
    return {"input_ids": ids} | ({"labels": ids} if inner is not None and takes_labels(inner) else {})


def small_step(model: nn.Module, batch: dict[str, Tensor]) -> SmallStep | None:
    """Return what the model computes of `small_batch`, without dropout; None for a model on the meta device.

    The gradients of the model's parameters stay as they are. A model without a loss of language models gets one.
    """
    if not has_values(next(model.parameters())):
        return None
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad():
            out: Any = model(**batch)
            logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss: Tensor | None = out.loss if "labels" in batch else None
            if loss is None:
                weights = torch.arange(logits.numel(), device=logits.device).sin().view(logits.shape)
                loss = (logits.double() * weights).sum()
            gradients: tuple[Tensor | None, ...] = ()
            if trained:
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    finally:
        for module, was in training.items():
            module.training = was
    return SmallStep(logits.detach(), loss.detach(), dict(zip(trained, gradients, strict=True)))


def compare(before: SmallStep | None, after: SmallStep | None, mesh: DeviceMesh) -> None:
    """Raise ValueError on all ranks if `after` differs from `before` on any of them, has a NaN, or differs by rank.

    before: what the whole model computed, None if it had no values. The call is a collective of the mesh.
    """
    if after is None:
        raise ValueError("check: the model is on the meta device: expected weights, or check=False")
    tolerance = _TOLERANCE.get(after.logits.dtype, 0.1)
    logits, groups = after.logits.double(), groups_of(mesh)
    device = logits.device
    if on_any_rank(not bool(logits.isfinite().all() and after.loss.isfinite()), device, *groups):
        raise ValueError("check: the parallelized model's logits are not finite")
    largest, smallest = logits, -logits
    for group in groups:
        largest, smallest = (collectives.all_reduce_max(x, group) for x in (largest, smallest))
    if on_any_rank(float((largest + smallest).max()) > tolerance * float(logits.abs().max()), device, *groups):
        raise ValueError("check: the ranks' logits differ from each other")
    if before is None:
        bad = [name for name, x in after.gradients.items() if x is not None and not local_tensor(x).isfinite().all()]
        if on_any_rank(bool(bad), device, *groups):
            raise ValueError(f"check: the gradient of {bad[0] if bad else 'a parameter'} is not finite")
        return
    _compare_values("logits", before.logits, after.logits, tolerance, _size(before.logits), groups)
    _compare_values("loss", before.loss, after.loss, tolerance, _size(before.loss), groups)
    most = max((_size(x) for x in before.gradients.values() if x is not None), default=0.0)
    for name, expected in before.gradients.items():
        actual = after.gradients[name]
        if actual is None or expected is None:
            if on_any_rank(actual is not expected, device, *groups):
                raise ValueError(f"check: {name} has a gradient in one of the whole and the parallelized model alone")
            continue
        found = gather_whole(actual) if isinstance(actual, DTensor) else actual
        scale = max(_size(expected), 1e-2 * most)
        _compare_values(f"gradient of {name}", expected, found, min(10 * tolerance, 0.25), scale, groups)


def _size(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _compare_values(
    name: str, expected: Tensor, actual: Tensor, tolerance: float, scale: float, groups: Sequence[dist.ProcessGroup]
) -> None:
    worst = _size(actual.reshape(expected.shape).double() - expected.double()) / max(scale, 1e-30)
    if on_any_rank(not worst <= tolerance, actual.device, *groups):
        raise ValueError(
            f"check: the parallelized model differs from the whole one in the {name}, by {worst:.1e} of the largest:"
            f" expected at most {tolerance:.0e}"
        )
