"""This module predicts a run by the model of cost (`tpfuse.cost`), and counts models and options for `tpfuse plan`.

A run is predicted if `tpfuse.cost.hardware` describes its GPUs and the model of cost knows its options.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import nn

from tpfuse.cost.hardware import Cluster, known_gpu, load_link, parse_network
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import TPFUSE, Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.step import Times, played_step, step_times
from tpfuse.parallel.pipeline.timeline import Timeline
from tpfuse.train.decoder import DecoderConfig
from tpfuse.train.errors import UserError
from tpfuse.train.language_model import ModelConfig, blocks_of
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.pipeline import micro_batch_size, pipeline_stages, stages_per_rank

_STATES = {"float32": (4, 8), "bfloat16": (2, 12), "float16": (2, 12)}  # parameter_bytes and state_bytes of a Program


@dataclass(frozen=True)
class Prediction:
    """A run as the model of cost sees it. blocks: the number of blocks of each stage of the pipeline."""

    sizes: ModelSizes
    layout: Layout
    cluster: Cluster
    program: Program
    blocks: tuple[int, ...]

    @property
    def times(self) -> Times:
        """Return the seconds of a step, by kind."""
        return step_times(self.sizes, self.layout, self.cluster, self.program, self.blocks)

    @property
    def timeline(self) -> Timeline:
        """Return the passes of a step of the pipeline, in seconds."""
        return played_step(self.sizes, self.layout, self.cluster, self.program, self.blocks)

    def described(self) -> str:
        """Return the step in words: its time, and the kinds that take at least a twentieth of it."""
        times = self.times
        shares = {kind.name: getattr(times, kind.name) / times.total for kind in fields(times)}
        largest = sorted((name for name in shares if shares[name] >= 0.05), key=lambda name: -shares[name])
        kinds = ", ".join(f"{name} {shares[name]:.0%}" for name in largest)
        tokens = self.layout.batch * self.sizes.tokens / times.total
        return f"{times.total * 1e3:.4g} ms a step on {self.cluster.gpu.name}, {tokens:,.0f} tokens/s; {kinds}"


def prediction(options: TrainCommand, config: ModelConfig, gpu: str, memory: int, per_node: int) -> Prediction | None:
    """Returns the prediction of a run; None if its GPU or its options are not known.

    options: with the layout filled in. gpu: the name that torch gives to each GPU. memory: its bytes. per_node: the
    ranks of a node.
    """
    known = known_gpu(gpu, memory)
    if known is None:
        return None
    layout = layout_of(options)
    try:
        sizes, program = sizes_of("the model", config), program_of(options)
    except UserError:
        return None
    cluster = Cluster(known, layout.ranks, per_node, load_link(known.links[0]), parse_network(PlanCommand.network))
    blocks = tuple(len(stage.layers) for stage in pipeline_stages(options, config))
    return Prediction(sizes, layout, cluster, program, blocks)


def layout_of(options: TrainCommand) -> Layout:
    """Returns the layout of a run. options: with the layout filled in."""
    parallel, train = options.parallel, options.train
    return Layout(
        parallel.tp, parallel.cp, parallel.dp, parallel.pp, parallel.pp_schedule, stages_per_rank(parallel),
        options.zero.stage, train.recompute, micro_batch_size(options), train.batch,
    )  # fmt: skip


def program_of(options: TrainCommand) -> Program:
    """Returns how the run computes. Raises UserError for options that the model of cost does not know."""
    train, zero = options.train, options.zero
    if train.dtype not in _STATES:
        raise UserError(f"train.dtype {train.dtype}: tpfuse plan knows {', '.join(_STATES)}")
    for name, value in (("train.autocast", train.autocast), ("zero.offload", zero.offload)):
        if value != "none":
            raise UserError(f"{name} {value}: tpfuse plan does not know its cost yet: leave it out")
    parameters, states = _STATES[train.dtype]
    gradients = 4 if zero.gradient_dtype == "float32" else parameters
    return replace(TPFUSE, parameter_bytes=parameters, gradient_bytes=gradients, state_bytes=states)


def sizes_of(name: str, config: ModelConfig) -> ModelSizes:
    """Returns the sizes of a model. Raises UserError for blocks that are not attention and an MLP."""
    if isinstance(config, DecoderConfig):
        return _sizes_of_decoder(name, config)
    return ModelSizes(
        name, config.n_layer, config.n_embd, config.n_head, config.n_head, config.n_embd // config.n_head,
        4 * config.n_embd, False, config.vocab_size, config.n_positions, positions=config.n_positions,
        biases=config.bias, norm_bias=config.bias, dropout=config.dropout > 0,
    )  # fmt: skip


def _sizes_of_decoder(name: str, config: DecoderConfig) -> ModelSizes:
    """Returns the sizes of a model of transformers. Raises UserError for blocks that are not attention and an MLP.

    What its configuration leaves open is found in the parameters of the model, which is made without memory.
    """
    model = config.empty(torch.float32)
    theirs: Any = model.config
    block = [tuple(parameter.shape) for parameter in blocks_of(model)[0].parameters()]
    parameters = sum(prod(shape) for shape in block)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()  # type: ignore[operator]
    inner = [getattr(theirs, key, None) for key in ("intermediate_size", "n_inner", "ffn_dim")]
    sizes = ModelSizes(
        name, config.n_layer, config.n_embd, config.n_head,
        kv_heads=getattr(theirs, "num_key_value_heads", None) or config.n_head,
        head_size=getattr(theirs, "head_dim", None) or config.n_embd // config.n_head,
        inner=next((size for size in inner if size), 4 * config.n_embd), gated=False, vocabulary=config.vocab_size,
        tokens=config.n_positions, positions=sum(len(table) for table in tables if len(table) != config.vocab_size),
        tied=head is None or any(head.weight is table for table in tables), biases=False,
        norm_bias=any(isinstance(module, nn.LayerNorm) for module in model.modules()),
    )  # fmt: skip
    found = sum(shape[0] * shape[1] for shape in block if len(shape) == 2)
    for gated in (False, True):
        sizes = replace(sizes, gated=gated)
        if sizes.block_weights == found and all(len(shape) < 3 for shape in block):
            biased = replace(sizes, biases=True)
            return min(sizes, biased, key=lambda each: abs(each.block_parameters - parameters))
    raise UserError(
        f"--model {name}: a block of {theirs.model_type} has {found:,} weights, and attention with an MLP"
        f" would have {sizes.block_weights:,}: tpfuse plan knows no other blocks, such as mixtures of experts"
    )
