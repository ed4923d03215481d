"""The models that `tpfuse train` trains, by their descriptions: the GPT of tpfuse, and decoders of transformers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.untrusted import check
from tpfuse.comm import collectives
from tpfuse.drop_in.structure import decoder_layers
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.train.batches import MicroBatch
from tpfuse.train.decoder import DecoderModel
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.gpt import GPTModel
from tpfuse.train.language_model import LanguageModel
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import pipeline_order

ModelConfig = GPTConfig | DecoderConfig


# The models by the types of their descriptions.
MODELS: dict[type, type[LanguageModel]] = {GPTConfig: GPTModel, DecoderConfig: DecoderModel}


def language_model(
    config: ModelConfig, options: TrainCommand, mesh: DeviceMesh | None, device: torch.device, dtype: torch.dtype
) -> LanguageModel:
    """Return the model of a description on this rank, with uninitialised parameters. Raise ValueError."""
    return MODELS[type(config)](config, options, mesh, device, dtype)


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
    return MODELS[type(config)].outlined(config, mesh, dtype)


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
