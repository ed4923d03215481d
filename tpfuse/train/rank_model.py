"""The models that `tpfuse train` trains: the GPT of tpfuse, and decoders of transformers (`tpfuse.train.decoder`)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.untrusted import check
from tpfuse.comm import collectives
from tpfuse.comm.mesh import flat_group, rank_and_size
from tpfuse.drop_in.structure import decoder_layers
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.train.batches import MicroBatch
from tpfuse.train.compiled import compiled
from tpfuse.train.decoder import DecoderConfig, DecoderModel
from tpfuse.train.language_model import Drawing, LanguageModel
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import own_stages, pipeline_order

ModelConfig = GPTConfig | DecoderConfig


class GPTModel(LanguageModel):
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
        rank, _ = rank_and_size(flat_group(mesh, "pp"))
        on_rank = GPTOptions(
            context_schedule=options.parallel.cp_schedule,
            context_balance=options.parallel.cp_balance,
            recompute=options.train.recompute,
            offload_activations=options.train.offload_activations,
            stages=own_stages(options, config, rank),
        )
        self.module: GPT = GPT(config, device="meta", dtype=dtype)
        parallelize_gpt(self.module, mesh, on_rank).to_empty(device=device)
        self.device_mesh = self.module.device_mesh
        self.context = self.module.context
        self.stages = self.module.stages
        self._forward: Any = self.module  # in training

    def draw(self, seed: int) -> None:
        initialize(self.module, seed)

    def compile(self, *, one_graph: bool) -> None:
        self._forward = compiled(self.module, one_graph=one_graph)

    def part(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        ids, targets, weight, at, sequences, cache, _ = batch
        forward = self.module if at is None else self._forward
        starts = None if targets is None or self.document_start is None else ids == self.document_start
        y: Tensor = forward(
            ids, targets, loss_weight=None if targets is None else weight, dropout_at=at, sequences_B=sequences,
            cache=cache, stage=stage, x_mC=x, starts_BT=starts,
        )  # fmt: skip
        return y

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        return self.module.modules_of(stage)

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        drawing: Drawing,
        ends: tuple[int, ...] = (),
        logits: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Tensor:
        forward = None if logits is None else lambda ids, cache: logits(MicroBatch(ids, cache=cache))
        eos = ends[0] if ends else None
        return generate(self.module, ids, tokens, eos=eos, forward=forward, **asdict(drawing))

    def flops_per_token(self) -> int:
        return self.module.flops_per_token()


def language_model(
    config: ModelConfig, options: TrainCommand, mesh: DeviceMesh | None, device: torch.device, dtype: torch.dtype
) -> LanguageModel:
    """Return the model of a description on this rank, with uninitialised parameters. Raise ValueError."""
    if isinstance(config, DecoderConfig):
        return DecoderModel(config, options, mesh, device, dtype)
    return GPTModel(config, options, mesh, device, dtype)


def pipeline_runner(
    model: LanguageModel,
    options: TrainCommand,
    group: dist.ProcessGroup,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Runner:
    """Return what runs the stages of this rank. autocast: returns the context in which losses are computed."""
    stages = {stage.index: stage for stage in model.stages}

    def compute(stage: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        with nullcontext() if batch.targets is None else autocast():
            return model.part(stages[stage], x, batch)

    modules = {index: model.modules_of(stage) for index, stage in stages.items()}
    return Runner(pipeline_order(options), compute, modules, group, device)


@torch.no_grad()
def pipeline_logits(model: LanguageModel, runner: Runner, batch: MicroBatch) -> Tensor:
    """Return the logits [sequences, vocabulary] of the last position, on all ranks of the pipeline."""
    dtype = next(model.module.parameters()).dtype
    logits = torch.zeros(len(batch.ids), model.config.vocab_size, dtype=dtype, device=runner.device)
    for output in runner.forward([batch]):
        logits = output[:, -1].contiguous()
    return collectives.all_reduce(logits, runner.group)


def outlined(config: ModelConfig, mesh: DeviceMesh | None, dtype: torch.dtype) -> nn.Module:
    """Return this rank's whole model on the meta device, without communication. mesh: tensor-parallel, or None."""
    if isinstance(config, DecoderConfig):
        return config.outlined(mesh, dtype)
    return parallelize_gpt(GPT(config, device="meta", dtype=dtype), mesh)


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return this rank's transformer blocks of a model, which ZeRO stage 3 gathers one after another."""
    if isinstance(model, GPT):
        return model.blocks
    return [layer for layer in decoder_layers(model) if not isinstance(layer, nn.Identity)]  # of other stages


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters of the whole model, counted in the model itself."""
    return sum(parameter.numel() for parameter in outlined(config, None, torch.float32).parameters())


def config_from_json(description: dict[str, Any]) -> ModelConfig:
    """Return the description of a model whose `as_json` has returned this.

    Raise Unreadable, TypeError or ValueError for another value.
    """
    if "settings" in description:
        check(description, {"settings": dict, "n_positions": int, "files": dict}, "the model")
        return DecoderConfig.from_json(description)
    hints = get_type_hints(GPTConfig)
    check(description, {name: hints[name] for name in description if name in hints}, "the model")
    return GPTConfig(**description)
