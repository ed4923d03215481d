"""An ordinary model of torch with two plans of styles, and what tests compare of a model before and after."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.styles import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel
from tpfuse.testing.inputs import integers, normal

IDS = integers(1, 2, 7, low=3, high=101, dtype=torch.int64)


class Block(nn.Module):
    """A residual MLP after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)
        self.norm.register_buffer("calls", torch.zeros(1))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Plain(nn.Module):
    """An ordinary model of torch, whose head is tied to its embedding."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> Plain:
    model = Plain().double()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape) / 3)
    return model


TIED = {
    "embed": FusedRowwiseParallel(input_layouts=Replicate()),
    "head": FusedColwiseParallel(output_layouts=Replicate()),
}
PLAN: dict[str, ParallelStyle] = {**TIED, "*.up": FusedColwiseParallel(), "*.down": FusedRowwiseParallel()}
# Block 0 is torch's, block 1 is tpfuse's; between them DTensors pass that are sharded along the sequence.
MIXED: dict[str, ParallelStyle] = {
    "embed": FusedRowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "blocks.0.norm": SequenceParallel(),
    "blocks.0.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.0.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "blocks.1.norm": FusedSequenceParallel(),
    "blocks.1.up": FusedColwiseParallel(input_layouts=Shard(1)),
    "blocks.1.down": FusedRowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "head": FusedColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip


def logits_of(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    out: Any = model(ids)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def evaluate(model: nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Return the logits and, by name, the whole gradients of all parameters."""
    model.zero_grad()
    logits = logits_of(model, ids)
    logits.sin().sum().backward()
    found = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = gather_whole(parameter.grad)
    return found


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, one in expected.items():
        error = (actual[name].reshape(one.shape) - one).abs().max()
        assert error < 1e-10, f"{name}: error {error}"


def anatomy_of(model: nn.Module) -> dict[str, Any]:
    """Return what a module is, but for its tensors: its class, its attributes and its hooks."""
    tensors = {"_parameters", "_buffers", "_modules"}
    return {
        name: (
            type(module),
            {
                key: dict(x) if isinstance(x, dict) else x
                for key, x in vars(module).items()
                if key not in tensors and not isinstance(x, Tensor)
            },
        )
        for name, module in model.named_modules()
    }


def check_anatomy(model: nn.Module, expected: dict[str, Any]) -> None:
    for name, (kind, attributes) in anatomy_of(model).items():
        assert kind is expected[name][0] and attributes.keys() == expected[name][1].keys(), name
        for key, value in attributes.items():
            assert value == expected[name][1][key], (name, key, value, expected[name][1][key])
