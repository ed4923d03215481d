"""The models that `tpfuse train` trains: the GPT of tpfuse, and decoders of transformers (`tpfuse.train.decoder`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import Slices
from tpfuse.comm.mesh import context_mesh, flat_group, rank_and_size, tensor_mesh
from tpfuse.drop_in.structure import decoder_layers
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, TIED, GPTConfig
from tpfuse.parallel.context import ContextParallel
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.train.batches import MicroBatch
from tpfuse.train.compiled import compiled
from tpfuse.train.decoder import DecoderConfig, DecoderModel
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import own_stages
from tpfuse.train.untrusted import check

ModelConfig = GPTConfig | DecoderConfig


class LanguageModel(Protocol):
    """A language model on one rank, or on many that share its layers, its sequences, or both.

    config: its description. context: the ranks that share each sequence. device_mesh: the tensor-parallel mesh, None
    for one rank. stages: the pipeline stages of this rank, which alone it has. document_start: the token with which a
    document begins, if the tokens of a document are to see each other alone in `loss`; else None.
    """

    document_start: int | None
    config: Any
    context: ContextParallel
    device_mesh: DeviceMesh | None
    stages: Sequence[Stage]

    @property
    def module(self) -> nn.Module:
        """Return the module with the parameters."""

    def draw(self, seed: int) -> None:
        """Draw the parameters from `seed`; they are the same in every layout of ranks."""

    def compile(self, *, one_graph: bool) -> None:
        """Let training steps run by torch.compile. one_graph: whether a break of the graph is an error."""

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weight: float,
        at: tuple[int, int] | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over all tokens of their losses in nats, times `weight`, as a scalar.

        ids, targets: [sequences, tokens] int64, equal on all ranks that share them. Each context-parallel rank returns
        its part of the sum. at: (seed, step) of the dropout in a training step; None to evaluate. sequences: the
        numbers of these sequences in the whole batch.
        """

    def part(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the output of a pipeline stage of this rank; that of the last stage is the loss, or the logits.

        x: the output of the stage before it, None for the first stage. Logits end with those of the last position.
        """

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        """Return the modules with the parameters of a pipeline stage of this rank."""

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None = None,
        ends: tuple[int, ...] = (),
        seed: int = 0,
        logits: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Tensor:
        """Return the prompts `ids`, [sequences, tokens] int64, each with at most `tokens` more.

        temperature: 0 takes the most probable token. top_k, top_p: as in `tpfuse.models.generate`. ends: tokens that
        end a text. logits: returns the logits [sequences, vocabulary] of the last position, equal on all ranks, if the
        stages of the model are on several ranks. All ranks call this, and return the same.
        """

    def flops_per_token(self) -> int:
        """Return the floating-point operations of a training step for each token."""

    def stored(
        self, name: str, tensor: Tensor, slices: Slices, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Slices]]:
        """Yield (whole shape, part of `tensor`, slices of it) as checkpoints have them, in every layout of ranks.

        tensor: the `slices` [start, stop) of a parameter of `shape`, or of its state in the optimizer.
        """


class GPTModel:
    """The GPT on this rank. mesh: the whole mesh of the run, None for one rank. Its parameters are uninitialised."""

    def __init__(
        self,
        config: GPTConfig,
        options: TrainCommand,
        mesh: DeviceMesh | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.document_start: int | None = None
        self.device_mesh = tensor_mesh(mesh)
        rank, _ = rank_and_size(flat_group(mesh, "pp"))
        self.module = GPT(
            config,
            device_mesh=self.device_mesh,
            context_mesh=context_mesh(mesh),
            context_schedule=options.parallel.cp_schedule,
            context_balance=options.parallel.cp_balance,
            recompute=options.train.recompute,
            stages=own_stages(options, config, rank),
            device=device,
            dtype=dtype,
        )
        self.context = self.module.context
        self.stages: Sequence[Stage] = self.module.stages
        self._forward: Any = self.module  # in training

    def draw(self, seed: int) -> None:
        """Draw the parameters."""
        initialize(self.module, seed)

    def compile(self, *, one_graph: bool) -> None:
        """Let training steps run by torch.compile."""
        self._forward = compiled(self.module, one_graph=one_graph)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weight: float,
        at: tuple[int, int] | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """Return the loss; see the protocol."""
        return self.part(self.stages[0], None, MicroBatch(ids, targets, weight, at, sequences))

    def part(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the output of a stage; see the protocol."""
        ids, targets, weight, at, sequences, cache, _ = batch
        forward = self.module if at is None else self._forward
        starts = None if targets is None or self.document_start is None else ids == self.document_start
        y: Tensor = forward(
            ids, targets, loss_weight=weight, dropout_at=at, sequences_B=sequences, cache=cache, stage=stage, x_mC=x,
            starts_BT=starts,
        )  # fmt: skip
        return y

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        """Return the modules of a stage."""
        return self.module.modules_of(stage)

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None = None,
        ends: tuple[int, ...] = (),
        seed: int = 0,
        logits: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Tensor:
        """Return the prompts with their continuations."""
        return generate(
            self.module,
            ids,
            tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos=ends[0] if ends else None,
            seed=seed,
            forward=None if logits is None else lambda ids, cache: logits(MicroBatch(ids, cache=cache)),
        )

    def flops_per_token(self) -> int:
        """Return the floating-point operations of a training step for each token."""
        return self.module.flops_per_token()

    def stored(
        self, name: str, tensor: Tensor, slices: Slices, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Slices]]:
        """Yield the shard as it is."""
        yield shape, tensor, slices


def language_model(
    config: ModelConfig, options: TrainCommand, mesh: DeviceMesh | None, device: torch.device, dtype: torch.dtype
) -> LanguageModel:
    """Return the model of a description on this rank, with uninitialised parameters. Raises ValueError."""
    if isinstance(config, DecoderConfig):
        return DecoderModel(config, options, mesh, device, dtype)
    return GPTModel(config, options, mesh, device, dtype)


def outlined(
    config: ModelConfig, mesh: DeviceMesh | None, dtype: torch.dtype, stages: Sequence[Stage] | None = None
) -> nn.Module:
    """Return this rank's model on the meta device, without communication.

    mesh: tensor-parallel, None for one rank. stages: the pipeline stages of a rank, None for the whole model.
    """
    if isinstance(config, DecoderConfig):
        return config.outlined(mesh, dtype, stages)
    return GPT(config, device_mesh=mesh, stages=stages, device="meta", dtype=dtype)


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return this rank's transformer blocks of a model, which ZeRO stage 3 gathers one after another."""
    if isinstance(model, GPT):
        return model.blocks
    return [layer for layer in decoder_layers(model) if not isinstance(layer, nn.Identity)]  # of other stages


def tied_parameters(config: ModelConfig) -> list[str]:
    """Return the names of the parameters that a pipeline's first and last stage share."""
    return config.tied if isinstance(config, DecoderConfig) else [TIED]


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters of the whole model, counted in the model itself."""
    return sum(parameter.numel() for parameter in outlined(config, None, torch.float32).parameters())


def longest(config: ModelConfig) -> int:
    """Return the model's context, in tokens, which training sequences of a model of transformers need not fill."""
    return config.longest if isinstance(config, DecoderConfig) else config.n_positions


def as_json(config: ModelConfig) -> dict[str, Any]:
    """Return what `config_from_json` makes the description of."""
    return config.as_json() if isinstance(config, DecoderConfig) else asdict(config)


def config_from_json(description: dict[str, Any]) -> ModelConfig:
    """Return the description of a model that `as_json` has returned.

    Raises Unreadable, TypeError or ValueError for another value.
    """
    if "settings" in description:
        check(description, {"settings": dict, "n_positions": int, "files": dict}, "the model")
        return DecoderConfig.from_json(description)
    hints = get_type_hints(GPTConfig)
    check(description, {name: hints[name] for name in description if name in hints}, "the model")
    return GPTConfig(**description)
