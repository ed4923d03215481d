"""The check of `parallelize(check=True)`: a small forward pass before and after the conversion."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpfuse.comm import collectives
from tpfuse.comm.layout import has_values
from tpfuse.comm.mesh import groups_of
from tpfuse.parallel.whole import anywhere, gather_whole

# The largest difference of two logits that counts as rounding, as a share of the largest logit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}


@torch.no_grad()
def small_forward(model: nn.Module, ranks: int) -> Tensor | None:
    """Return the logits of a few tokens without dropout, or None for a model on the meta device.

    The tokens are the same on all ranks, and their number is not a multiple of `ranks`. Raise ValueError for a model
    without the `config.vocab_size` that transformers' models have.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ValueError("check: the model has no config.vocab_size, from which to make tokens: expected check=False")
    parameter = next(model.parameters())
    if not has_values(parameter):
        return None
    length = 2 * ranks + 1
    ids = (torch.arange(2 * length, device=parameter.device) * 7919 % vocabulary).view(2, length)
    training = {module: module.training for module in model.modules()}
    try:
        out: Any = model.eval()(input_ids=ids)
    finally:
        for module, was in training.items():
            module.training = was
    logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
    return (gather_whole(logits) if isinstance(logits, DTensor) else logits).detach()


def compare(before: Tensor | None, after: Tensor | None, mesh: DeviceMesh) -> None:
    """Raise ValueError on all ranks if `after` differs from `before` on any of them, has a NaN, or differs by rank.

    before: the logits of the whole model, None if it had no values. The call is a collective of the mesh.
    """
    if after is None:
        raise ValueError("check: the model is on the meta device: expected weights, or check=False")
    tolerance = _TOLERANCE.get(after.dtype, 0.1)
    logits = after.double()
    if anywhere(not bool(logits.isfinite().all()), mesh):
        raise ValueError("check: the parallelized model's logits are not finite")
    largest, smallest = logits, -logits
    for group in groups_of(mesh):
        largest, smallest = (collectives.all_reduce_max(x, group) for x in (largest, smallest))
    if anywhere(float((largest + smallest).max()) > tolerance * float(logits.abs().max()), mesh):
        raise ValueError("check: the ranks' logits differ from each other")
    if before is not None:
        expected = before.double()
        worst = float((logits - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
        if anywhere(worst > tolerance, mesh):
            raise ValueError(
                f"check: the parallelized model's logits differ from the whole model's by {worst:.1e} of the largest:"
                f" expected at most {tolerance:.0e}"
            )
