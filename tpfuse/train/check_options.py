"""Checks of the options of `tpfuse train` by themselves, before the model or the data are known, and their layout."""

import os
from dataclasses import replace
from pathlib import Path

from tpfuse import switches
from tpfuse.comm.sum_order import VirtualRanks
from tpfuse.errors import UserError, check_at_least, refusing
from tpfuse.switches import resolved_kernels, use
from tpfuse.train.compiled import check_compiler
from tpfuse.train.config import profiled_steps
from tpfuse.train.hardware import device_count
from tpfuse.train.muon_options import muon_options
from tpfuse.train.nvtx import nvtx_package
from tpfuse.train.option_marks import check_needs
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import described_layout, pipeline_order, rank_count, stage_owners
from tpfuse.train.rules import check_rules
from tpfuse.train.schedule import lowest, steps_of
from tpfuse.zero.compression import compression_of

_MOST_STAGES = 1024  # no model has more layers, and the order of so many takes seconds
_LONGEST_TIMEOUT = 1e6


def with_layout(options: TrainCommand, world: int | None) -> TrainCommand:
    """Return `options` with dp filled in for `world` ranks.

    world: None for the number of ranks that fits this machine (see `ParallelOptions`). Raise UserError if the world is
    not tp x cp x dp x pp, or if a machine with GPUs has too few of them.
    """
    parallel = options.parallel
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    check_at_least({f"parallel.{name}": (getattr(parallel, name), 1) for name in ("tp", "cp", "pp", "dp")})
    ranks = device_count() if world is None else world
    dp = parallel.dp or max(1, ranks // (tp * cp * pp))
    layout, needed = described_layout(tp=tp, cp=cp, dp=dp, pp=pp), tp * cp * dp * pp
    if world is None and ranks and needed > ranks:
        raise UserError(f"{layout} needs {needed} GPUs, and this machine has {ranks}")
    if world is not None and needed != world:
        raise UserError(f"{layout} needs {needed} ranks, and there are {world}")
    return replace(options, parallel=replace(parallel, dp=dp))


def check_options(options: TrainCommand) -> None:
    """Raise UserError for options that no run can have, whatever its data. options: with the layout filled in."""
    if options.profile.nvtx:
        nvtx_package()
    profiled_steps(options.profile.steps)
    _check_paths(options.out, options.data.path, options.data.val_path, options.init_from, options.model.from_)
    for check in (check_needs, check_rules, _check_ranges, _check_schedule, _check_muon, _check_zero, _check_batch):
        check(options)


def _check_paths(*paths: Path | None) -> None:
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UserError(f"{str(path)!r}: the name is not UTF-8: rename it") from None


def _check_ranges(options: TrainCommand) -> None:
    train, optim, parallel = options.train, options.optim, options.parallel
    at_least: dict[str, tuple[float | None, float]] = {
        "train.steps": (train.steps, 1), "train.batch": (train.batch, 1), "train.micro-batch": (train.micro_batch, 1),
        "train.eval-every": (train.eval_every, 0), "train.eval-batches": (train.eval_batches, 1),
        "train.save-every": (train.save_every, 0), "train.keep": (train.keep, 0),
        "train.log-every": (train.log_every, 1),
        "optim.clip": (optim.clip, 0), "optim.weight-decay": (optim.weight_decay, 0), "optim.lr": (optim.lr, 0),
        "optim.min-lr": (optim.min_lr, 0), "parallel.measure-seconds": (parallel.measure_seconds, 0),
        "parallel.cp-ulysses": (parallel.cp_ulysses, 1), "restarts": (options.restarts, 0),
        "parallel.pp-stages-per-rank": (parallel.pp_stages_per_rank, 1),
    }  # fmt: skip
    check_at_least(at_least)
    if optim.schedule != "constant" and lowest(optim) > optim.lr:
        raise UserError(
            f"--optim.min-lr {optim.min_lr} is above --optim.lr {optim.lr}: the rate would rise after the warm-up;"
            " give less, or None for a tenth"
        )
    check_timeout(options.comm.timeout)
    if not -(2**63) <= train.seed < 2**63:
        raise UserError(f"--train.seed {train.seed}: expected a number of 64 bits with a sign")
    below_one = {"optim.beta1": optim.beta1, "optim.beta2": optim.beta2, "data.val-fraction": options.data.val_fraction}
    for name, value in below_one.items():
        if not 0.0 <= value < 1.0:
            raise UserError(f"--{name} {value}: expected at least 0, and below 1")


def check_timeout(seconds: float) -> None:
    """Raise UserError for a --comm.timeout that is none."""
    check_at_least({"comm.timeout": (seconds, 1)})
    if seconds > _LONGEST_TIMEOUT:
        raise UserError(f"--comm.timeout {seconds}: expected at most {_LONGEST_TIMEOUT:g} seconds")


def _check_batch(options: TrainCommand) -> None:
    """Raise UserError for a batch that the ranks, the pipeline or the memory cannot have."""
    train, dp = options.train, options.parallel.data_ranks
    if train.batch % dp:
        raise UserError(f"--train.batch {train.batch} cannot be divided among {dp} data-parallel ranks")
    with refusing("--train.virtual-ranks: "):
        VirtualRanks.of(train.virtual_ranks, 1, dp)
    ranks, kind = (train.virtual_ranks, "virtual rank") if train.virtual_ranks else (dp, "rank")
    if train.batch % ranks:
        raise UserError(f"--train.batch {train.batch} cannot be divided among {ranks} {kind}s")
    share = train.batch // dp
    if train.micro_batch and train.batch // ranks % train.micro_batch:
        raise UserError(
            f"--train.micro-batch {train.micro_batch} does not divide the {train.batch // ranks} sequences of each"
            f" {kind} (--train.batch {train.batch}, {'virtual-ranks' if train.virtual_ranks else 'dp'} {ranks})"
        )
    stages = options.parallel.pp * (options.parallel.pp_stages_per_rank or 1)
    if stages > _MOST_STAGES:
        raise UserError(f"--parallel.pp {options.parallel.pp}: {stages} stages: expected at most {_MOST_STAGES}")
    with refusing(f"--parallel.pp-stages-per-rank {options.parallel.pp_stages_per_rank}: "):
        stage_owners(options.parallel)
    if options.parallel.pp > 1:
        given = f", --train.micro-batch {train.micro_batch}" if train.micro_batch else ""
        with refusing("", f" (--train.batch {train.batch}, dp {dp}{given})"):
            pipeline_order(options)
    held = 8 * (train.batch + share * (options.model.n_positions + 1))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if held > memory:
        raise UserError(
            f"--train.batch {train.batch}: the token ids of one step take {held / 2**30:.0f} GiB on each rank,"
            f" and this machine has {memory / 2**30:.0f} GiB"
        )


def _check_schedule(options: TrainCommand) -> None:
    optim, tokens = options.optim, max(1, options.train.batch * options.model.n_positions)
    lengths = {"warmup": (optim.warmup, 0), "decay-steps": (optim.decay_steps, 1), "decay": (optim.decay, 1)}
    for name, (length, least) in lengths.items():
        if length is not None and steps_of(length, tokens, name) < least:
            raise UserError(f"--optim.{name} {length}: expected at least {least}")


def _check_muon(options: TrainCommand) -> None:
    """Raise UserError for options that no Muon has."""
    optim = options.optim
    if optim.muon_lr is not None and not optim.lr:
        raise UserError("--optim.muon-lr follows the schedule of --optim.lr, which is 0: expected more than 0")
    with refusing("--optim.name muon: "):
        muon_options(optim)


def _check_zero(options: TrainCommand) -> None:
    zero, parallel = options.zero, options.parallel
    if zero.stage not in (0, 1, 2, 3):
        raise UserError(f"--zero.stage {zero.stage}: expected 0, 1, 2 or 3")
    ranks = parallel.data_ranks * parallel.cp
    if parallel.replicas < 1 or ranks % parallel.replicas:
        expected = f"a number that divides the {ranks} data-parallel ranks"
        raise UserError(f"--parallel.replicas {parallel.replicas}: expected {expected}")
    with refusing("--zero."):
        compression_of(zero.compression)


def check_kernels(options: TrainCommand) -> None:
    """Raise UserError for kernels and implementations that this machine does not have."""
    with refusing("--"), use(kernels=options.kernels):
        resolved_kernels("cuda" if device_count() else "cpu")
    if options.train.compile:
        check_compiler()
    if device_count():
        return
    train, communicates = options.train, rank_count(options.parallel) > 1
    for name, given in (("cuda-graph", train.cuda_graph == "yes"), ("offload-activations", train.offload_activations)):
        if given:
            raise UserError(f"--train.{name} needs a GPU, and this machine has none: leave it out")
    if options.parallel.impl == "fused" and communicates and not switches.INTERPRETED:
        raise UserError(
            "--parallel.impl fused on a CPU is interpreted: set TRITON_INTERPRET=1 before the program starts"
        )
