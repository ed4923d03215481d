"""A language model on one rank, or on ranks that share its layers, sequences, or both, as `tpfuse train` uses it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.manifest import Shard
from tpfuse.comm.layout import Slices
from tpfuse.parallel.context import ContextParallel
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.plan.sizes import ModelSizes
from tpfuse.train.batches import MicroBatch
from tpfuse.train.options import TrainCommand


@dataclass(frozen=True)
class Drawing:
    """The settings by which tokens are drawn (`tpfuse.models.generate`). temperature: 0 takes the most probable one."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class ModelFiles:
    """The weights of a model in a folder of Hugging Face.

    left_out: a line about tensors that the model has no layer for, or "". read: fills a shard of the parameter of a
    name; raise ValueError for files that cannot be read any more.
    """

    left_out: str
    read: Callable[[str, Shard], None]


class LanguageModel(ABC):
    """A language model. Its parameters are uninitialised at first."""

    # Its description.
    config: Any
    # The module with the parameters.
    module: nn.Module
    # The ranks that share each sequence.
    context: ContextParallel
    # Tensor-parallel; None for one rank.
    device_mesh: DeviceMesh | None
    # The pipeline stages of this rank, which alone it has.
    stages: Sequence[Stage]
    # The token with which a document begins, if the tokens of a document see each other alone in `loss`.
    document_start: int | None = None

    @abstractmethod
    def __init__(
        self, config: Any, options: TrainCommand, mesh: DeviceMesh | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the model of a description on this rank. mesh: that of the run. Raise ValueError."""

    @staticmethod
    @abstractmethod
    def outlined(config: Any, mesh: DeviceMesh | None, dtype: torch.dtype) -> nn.Module:
        """Return a rank's whole model on the meta device, without communication. mesh: tensor-parallel, or None."""

    @staticmethod
    @abstractmethod
    def sizes(name: str, config: Any, dtype: str) -> ModelSizes:
        """Return the sizes of a model. Raise UserError for blocks that have no attention, or that are not all alike.

        dtype: that of the parameters, on which depends what models of transformers keep for the backward pass.
        """

    @staticmethod
    @abstractmethod
    def files(config: Any, folder: Path) -> ModelFiles:
        """Return the weights in a folder of Hugging Face. Raise ValueError, unless the model can have them."""

    @abstractmethod
    def draw(self, seed: int) -> None:
        """Draw the parameters from `seed`; they are the same in every layout of ranks."""

    @abstractmethod
    def compile(self, *, one_graph: bool) -> None:
        """Let training steps run by torch.compile. one_graph: whether a break of the graph is an error."""

    def loss(self, batch: MicroBatch) -> Tensor:
        """Return the sum over all tokens of their losses in nats, times the weight of the batch, as a scalar.

        Each context-parallel rank returns its part of the sum.
        """
        return self.part(self.stages[0], None, batch)

    @abstractmethod
    def part(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the output of a pipeline stage of this rank; that of the last stage is the loss, or the logits.

        x: the output of the stage before it, None for the first stage. Logits end with those of the last position.
        """

    @abstractmethod
    def modules_of(self, stage: Stage) -> list[nn.Module]:
        """Return the modules with the parameters of a pipeline stage of this rank."""

    @abstractmethod
    def generate(
        self,
        ids: Tensor,
        tokens: int,
        drawing: Drawing,
        ends: tuple[int, ...] = (),
        logits: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Tensor:
        """Return the prompts `ids`, [sequences, tokens] int64, each with at most `tokens` more.

        ends: tokens that end a text. logits: returns the logits [sequences, vocabulary] of the last position, equal on
        all ranks, if the stages of the model are on several ranks. All ranks call this, and return the same.
        """

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the floating-point operations of a training step for each token."""

    def stored(
        self, name: str, tensor: Tensor, slices: Slices, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Slices]]:
        """Yield (whole shape, part of `tensor`, slices of it) as checkpoints have them, in every layout of ranks.

        tensor: the `slices` [start, stop) of a parameter of `shape`, or of its state in the optimizer.
        """
        yield shape, tensor, slices
