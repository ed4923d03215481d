"""The GPT of tpfuse in `tpfuse train`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.manifest import Shard
from tpfuse.comm.mesh import flat_group, rank_and_size
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.huggingface import open_pretrained
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.plan.sizes import ModelSizes
from tpfuse.train.batches import MicroBatch
from tpfuse.train.compiled import compiled
from tpfuse.train.language_model import Drawing, LanguageModel, ModelFiles
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import own_stages


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
            stages=own_stages(options.parallel, config, rank),
        )
        self.module: GPT = GPT(config, device="meta", dtype=dtype)
        parallelize_gpt(self.module, mesh, on_rank).to_empty(device=device)
        self.device_mesh = self.module.device_mesh
        self.context = self.module.context
        self.stages = self.module.stages
        self._forward: Any = self.module  # in training

    @staticmethod
    def outlined(config: GPTConfig, mesh: DeviceMesh | None, dtype: torch.dtype) -> nn.Module:
        return parallelize_gpt(GPT(config, device="meta", dtype=dtype), mesh)

    @staticmethod
    def sizes(name: str, config: GPTConfig, dtype: str) -> ModelSizes:
        return ModelSizes(
            name, config.n_layer, config.n_embd, config.n_head, config.n_head, config.n_embd // config.n_head,
            4 * config.n_embd, False, config.vocab_size, config.n_positions, positions=config.n_positions,
            biases=config.bias, norm_bias=config.bias, dropout=config.dropout > 0, is_gpt=True,
        )  # fmt: skip

    @staticmethod
    def files(config: GPTConfig, folder: Path) -> ModelFiles:
        pretrained = open_pretrained(folder)

        def read(name: str, shard: Shard) -> None:
            if shard.tensor.numel():
                shard.tensor.detach().copy_(pretrained.read(name, shard.slices))

        return ModelFiles(pretrained.left_out, read)

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
