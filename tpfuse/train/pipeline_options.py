"""The pipeline that the options of a run mean: the order of a step, and the stages of the model."""

import contextlib

from tpfuse.parallel.pipeline.cut import Cost, Cuttable, Stage, cut_layers, explicit_cut, stage_costs
from tpfuse.parallel.pipeline.order import Order, order, stage_ranks, usual_stages
from tpfuse.parallel.pipeline.timeline import Timeline, predicted
from tpfuse.train.options import ParallelOptions, TrainCommand

_ROUNDS = 4  # micro-batches for each pipeline rank, by default


def rank_count(parallel: ParallelOptions) -> int:
    """Return the number of ranks of a layout that is filled in."""
    return parallel.tp * parallel.cp * parallel.data_ranks * parallel.pp


def described_layout(*, tp: int, cp: int, dp: int, pp: int) -> str:
    """Return the numbers of ranks in words; cp and pp are left out where they are 1."""
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("tp", "dp"))


def stages_per_rank(parallel: ParallelOptions) -> int:
    """Return the number of stages of each pipeline rank."""
    return parallel.pp_stages_per_rank or (usual_stages(parallel.pp_schedule) if parallel.pp > 1 else 1)


def stage_owners(parallel: ParallelOptions) -> tuple[int, ...]:
    """Return the pipeline rank of each stage. Raise ValueError for stages that the schedule does not have."""
    return stage_ranks(parallel.pp_schedule, parallel.pp, stages_per_rank(parallel))


def micro_batch_size(options: TrainCommand) -> int:
    """Return the sequences of a micro-batch. options: with the layout filled in.

    By default a micro-batch has all sequences of the rank, or of a virtual rank. A pipeline without virtual ranks has
    at least four micro-batches for each of its ranks if the batch allows it: the bubble is then at most a fifth of the
    step.
    """
    share, ranks = options.train.batch // options.parallel.data_ranks, options.parallel.pp
    if options.train.virtual_ranks:
        share = options.train.batch // options.train.virtual_ranks
    if options.train.micro_batch or options.train.virtual_ranks or ranks == 1:
        return options.train.micro_batch or share
    counts = []
    for count in (count for count in range(1, share + 1) if share % count == 0):
        with contextlib.suppress(ValueError):
            order(options.parallel.pp_schedule, ranks, stages_per_rank(options.parallel), count)
            counts.append(count)
    enough = [count for count in counts if count >= _ROUNDS * ranks]
    return share // (enough[0] if enough else counts[-1] if counts else share)


def micro_batch_sizes(options: TrainCommand) -> list[int]:
    """Return the sizes of micro-batches that a run may take where none is given, the largest first.

    options: with the layout filled in. The largest is that of `micro_batch_size`.
    """
    most, share = micro_batch_size(options), options.train.batch // options.parallel.data_ranks
    found = []
    for size in (size for size in range(most, 0, -1) if share % size == 0):
        with contextlib.suppress(ValueError):
            order(options.parallel.pp_schedule, options.parallel.pp, stages_per_rank(options.parallel), share // size)
            found.append(size)
    return found or [most]


def pipeline_order(options: TrainCommand) -> Order:
    """Return the order of a step. options: with the layout filled in.

    Raise ValueError for a number of micro-batches, or of stages, that the schedule refuses.
    """
    parallel = options.parallel
    stage_owners(parallel)
    micro_batches = options.train.batch // parallel.data_ranks // micro_batch_size(options)
    return order(parallel.pp_schedule, parallel.pp, stages_per_rank(parallel), micro_batches)


def predicted_timeline(options: TrainCommand, config: Cuttable) -> Timeline:
    """Return a step whose passes take time by their operations alone, in operations for each token."""
    return predicted(pipeline_order(options), pipeline_costs(options.parallel, config))


def pipeline_costs(parallel: ParallelOptions, config: Cuttable) -> list[Cost]:
    """Return the costs of the stages, as they are counted for the cut. Raise as `pipeline_stages` does."""
    return stage_costs(pipeline_stages(parallel, config), *config.part_costs())


def pipeline_stages(parallel: ParallelOptions, config: Cuttable) -> list[Stage]:
    """Return the stages of the model on all pipeline ranks. Raise ValueError for layers that cannot be cut so."""
    owners, costs = stage_owners(parallel), config.part_costs()
    if parallel.pp_layers:
        return explicit_cut(parallel.pp_layers, len(costs[0]), len(owners))
    return cut_layers(*costs, owners)


def own_stages(parallel: ParallelOptions, config: Cuttable, rank: int) -> list[Stage]:
    """Return the stages of a pipeline rank. Raise as `pipeline_stages` does."""
    stages, owners = pipeline_stages(parallel, config), stage_owners(parallel)
    return [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
