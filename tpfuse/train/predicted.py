"""A run as the model of cost sees it (`tpfuse.plan`): its model's sizes, its layout, its program, and its prediction.

A run is predicted if `tpfuse.plan.hardware` describes its GPUs and the model of cost knows its options.
"""

from dataclasses import dataclass, fields, replace
from operator import attrgetter

import torch

from tpfuse.errors import UserError
from tpfuse.parallel.pipeline.timeline import Timeline
from tpfuse.plan.hardware import Cluster, known_gpu, parse_network
from tpfuse.plan.sizes import TPFUSE, ModelSizes, RankLayout, TrainingProgram
from tpfuse.plan.time import StepTimes, simulated_step, step_times
from tpfuse.train.model_options import ulysses_ranks
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.pipeline_options import micro_batch_size, pipeline_stages, stages_per_rank
from tpfuse.train.rank_model import MODELS, ModelConfig

_TIMED = ("float32", "bfloat16", "float16")  # the dtypes whose rates are known
UNTIMED = (
    "train.autocast", "train.offload_activations", "train.virtual_ranks", "zero.offload", "zero.compression",
    "parallel.replicas",
)  # fmt: skip
"""The options whose cost the model of cost does not know."""


@dataclass(frozen=True)
class Prediction:
    """A run as the model of cost sees it."""

    sizes: ModelSizes
    layout: RankLayout
    cluster: Cluster
    program: TrainingProgram
    # The number of blocks in each pipeline stage.
    blocks: tuple[int, ...]

    @property
    def times(self) -> StepTimes:
        """Return the seconds of a step, by kind."""
        return step_times(self.sizes, self.layout, self.cluster, self.program, self.blocks)

    @property
    def timeline(self) -> Timeline:
        """Return the passes of a step of the pipeline, in seconds."""
        return simulated_step(self.sizes, self.layout, self.cluster, self.program, self.blocks)

    def described(self) -> str:
        """Return the step in words: its time, and the kinds that take at least a twentieth of it."""
        times = self.times
        shares = {kind.name: getattr(times, kind.name) / times.total for kind in fields(times)}
        largest = sorted((name for name in shares if shares[name] >= 0.05), key=lambda name: -shares[name])
        kinds = ", ".join(f"{name} {shares[name]:.0%}" for name in largest)
        tokens = self.layout.batch * self.sizes.tokens / times.total
        cluster, place = self.cluster, self.cluster.gpu.name
        if cluster.gpus > cluster.per_node:  # a run does not say what connects its nodes
            place += f" with a network of {cluster.network.name} between nodes"
        return f"{times.total * 1e3:.4g} ms a step on {place}, {tokens:,.0f} tokens/s; {kinds}"


def prediction(options: TrainCommand, config: ModelConfig, gpu: str, memory: int, per_node: int) -> Prediction | None:
    """Return the prediction of a run; None for an unknown GPU, a CPU, and options that the model of cost lacks.

    options: with the layout filled in. gpu: the name that torch gives to each GPU; "" for a CPU. memory: its bytes.
    per_node: the ranks of a node.
    """
    known = known_gpu(gpu, memory)
    if known is None:
        return None
    layout = layout_of(options)
    try:
        check_timed(options)
        sizes = sizes_of("the model", config, options.train.dtype)
        check_timed_model(sizes)
        program = program_of(options, config.n_head)
    except UserError:
        return None
    cluster = Cluster(known, layout.ranks, per_node, parse_network(PlanCommand.network))
    return Prediction(sizes, layout, cluster, program, stage_blocks(options, config))


def check_timed(options: TrainCommand) -> None:
    """Raise UserError for options whose times the model of cost does not know."""
    if options.train.dtype not in _TIMED:
        raise UserError(f"train.dtype {options.train.dtype}: tpfuse plan knows {', '.join(_TIMED)}")
    for name in UNTIMED:
        value, usual = map(attrgetter(name), (options, TrainCommand()))
        if value != usual:
            given = name if value is True else f"{name} {value}"
            raise UserError(f"{given}: tpfuse plan does not know its cost yet: leave it out")


def check_timed_model(sizes: ModelSizes) -> None:
    """Raise UserError for a model whose times the model of cost does not know."""
    if not all(sizes.kept):
        raise UserError(
            f"{sizes.name}: its forward pass depends on values: tpfuse plan does not know the memory of its activations"
        )
    if sizes.other_matrices:
        raise UserError(
            f"{sizes.name}: a block is not attention with an MLP: tpfuse plan does not know the times of mixtures of"
            " experts and other blocks; `tpfuse memory` counts their parameters"
        )


def layout_of(options: TrainCommand) -> RankLayout:
    """Return the layout of a run. options: with the layout filled in."""
    parallel, train = options.parallel, options.train
    return RankLayout(
        parallel.tp, parallel.cp, parallel.data_ranks, parallel.pp, parallel.pp_schedule, stages_per_rank(parallel),
        options.zero.stage, train.recompute, micro_batch_size(options), train.batch, parallel.replicas,
    )  # fmt: skip


def stage_blocks(options: TrainCommand, config: ModelConfig) -> tuple[int, ...]:
    """Return the number of blocks in each pipeline stage; () without a pipeline."""
    if options.parallel.pp == 1:
        return ()
    return tuple(len(stage.layers) for stage in pipeline_stages(options.parallel, config))


def program_of(options: TrainCommand, heads: int) -> TrainingProgram:
    """Return how the run computes. heads: those of a layer. Raise ValueError as `ulysses_ranks` does."""
    train, zero, parallel = options.train, options.zero, options.parallel
    size = getattr(torch, train.dtype).itemsize
    widths = {"float32": max(4, size), "parameter": size}
    gradients, virtual = widths[zero.gradient_dtype], train.virtual_ranks
    return replace(
        TPFUSE,
        parameter_bytes=size,
        gradient_bytes=gradients,
        accumulate="whole" if virtual or (zero.compression != "none" and zero.stage < 3) else zero.accumulate,
        subtrees=(virtual // parallel.data_ranks).bit_length() - 1 if virtual else None,
        reduce_bytes=gradients if zero.reduce_dtype == "gradient" else widths[zero.reduce_dtype],
        autocast_bytes=0 if train.autocast == "none" else getattr(torch, train.autocast).itemsize,
        half_moments=options.optim.state_dtype == "bfloat16",
        offloads_inputs=train.offload_activations,
        triton=options.kernels != "torch" and train.dtype != "float64",
        context_schedule=parallel.cp_schedule,
        # Only running ranks know which implementation "auto" stands for. That of any group can be collective.
        implementation="collective" if parallel.impl == "auto" else parallel.impl,
        balance=parallel.cp_balance,
        ulysses=ulysses_ranks(parallel, heads // parallel.tp),
        muon_steps=options.optim.muon_steps if options.optim.name == "muon" else 0,
    )


def sizes_of(name: str, config: ModelConfig, dtype: str) -> ModelSizes:
    """Return `LanguageModel.sizes` of the model that `config` describes."""
    return MODELS[type(config)].sizes(name, config, dtype)
