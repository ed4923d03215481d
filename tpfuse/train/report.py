"""The lines that a run prints around its steps: what it will do, what it has measured, what came out."""

from collections.abc import Sequence

import numpy as np
import torch

from tpfuse.errors import UserError
from tpfuse.layers.explain import plans, summary
from tpfuse.parallel.pipeline.timeline import Timeline
from tpfuse.switches import resolved_kernels
from tpfuse.train.batches import Mixture, unigram_loss
from tpfuse.train.data import percent
from tpfuse.train.hardware import held_bytes, memory_bytes
from tpfuse.train.launch import RankInfo
from tpfuse.train.memory import memory_of, remarks
from tpfuse.train.messages import program, say
from tpfuse.train.metrics import draw_losses, read_metrics
from tpfuse.train.options import TrainOptions
from tpfuse.train.pipeline_options import described_layout, micro_batch_size, pipeline_costs, pipeline_stages
from tpfuse.train.predicted import Prediction
from tpfuse.train.rank_model import parameter_count
from tpfuse.train.setup import PreparedRun
from tpfuse.train.step_graph import LAUNCHED
from tpfuse.train.trainer import Trainer

_SAMPLE_TOKENS = 200
_COUNTED = 2**30  # tokens: seconds of counting, while the other ranks have ended


def introduce(
    run: PreparedRun,
    trainer: Trainer,
    tokens: Mixture,
    info: RankInfo,
    *,
    peak: tuple[float, str],
    micro_batch: str,
    predicted: Timeline | None,
    prediction: Prediction | None,
) -> None:
    """Print what the run will do. Collective.

    peak: the FLOP/s of a rank, and where they are known from; micro_batch: why micro-batches have their size, or "";
    predicted: the step of a pipeline; prediction: the planner's, if it can predict the run.
    """
    options, train, config, device = run.options, run.options.train, run.config, trainer.device
    layers, pipeline = plans(trainer.model), []
    if trainer.runner is not None and predicted is not None:
        stages, costs = pipeline_stages(options.parallel, config), pipeline_costs(options.parallel, config)
        plan = trainer.runner.plan(stages, costs, trainer.dtype, predicted)
        pipeline = plan.explanation(f" of {micro_batch_size(options)} sequences")
    if info.rank > 0:
        return
    count, world = torch.get_num_threads(), info.world
    threads = f", {count} thread{'s' * (count > 1)} each" if device.type == "cpu" else ""
    if run.weights is not None:
        say(f"weights  from {run.weights}")
    kind = f"{config.family}, " if config.family else ""
    size = f"{config.n_layer} layers x {config.n_embd} wide, {config.n_head} heads"
    say(f"model    {kind}{size}, {parameter_count(config) / 1e6:.2f}M parameters")
    say(f"text     {_text(run, tokens)}, vocabulary {config.vocab_size}")
    layout = described_layout(tp=trainer.tp, cp=trainer.context.size, dp=trainer.dp, pp=options.parallel.pp)
    precision = train.dtype + ("" if train.autocast == "none" else f" with autocast to {train.autocast}")
    say(f"ranks    {layout} on {device.type}{threads}, {precision}, {_kernels(trainer, train)}")
    if pipeline:
        say("pipeline " + "\n         ".join(pipeline))
    if layers and trainer.tp * trainer.context.size > 1:
        say(f"layers   {summary([each for each in layers if each.implementation != 'local'])}")
    a_step = train.batch * config.n_positions
    say(f"batch    {train.batch} sequences of {config.n_positions} tokens = {a_step} tokens per step")
    if micro_batch:
        say(f"         {micro_batch}")
    say(f"memory   {_counted(run, trainer)}")
    say(f"MFU      of {peak[0] * world / 1e12:.3g} TFLOP/s ({world} x {peak[0] / 1e12:.3g}, {peak[1]})")
    if prediction is not None:
        say(f"plan     {prediction.described()} (predicted, see tpfuse plan)")
    say(f"run      {run.folder}" + (f", continuing after step {trainer.step}" if trainer.step else ""))
    for line in run.changes:
        say(line)


def _text(run: PreparedRun, tokens: Mixture) -> str:
    """Return in words how many tokens there are, and how often the run reads each."""
    train, data, whole, parts = run.options.train, run.data, sum(tokens.shares), []
    read = train.steps * train.batch * run.config.n_positions / whole
    for files, source, share in zip(data.train.files, tokens.sources, tokens.shares, strict=True):
        times = read * share / len(source)
        often = f"{times:.1f}" if times >= 1 else f"{times:.1g}"
        weight = f"{percent(share / whole)} of the sequences from " if len(tokens.shares) > 1 else ""
        parts.append(f"{weight}{files.source}: {len(source):,} tokens, each read {often} times")
    validation = "" if data.val is None else f"; validation on {data.val.count:,} tokens of {data.val.source}"
    return f"{'; '.join(parts)} in {train.steps} steps{validation}"


def _counted(run: PreparedRun, trainer: Trainer) -> str:
    """Return in words the memory that `tpfuse memory` counts, without the workspace."""
    stage = run.options.zero.stage
    by = f" ({trainer.exchanged_by})" if trainer.replicas > 1 else ""
    try:
        _, counted = memory_of(run.options, run.config, trainer.language_model.device_mesh, [stage])[stage]
    except UserError as error:
        return f"ZeRO stage {stage}{by}, not counted: {error}"
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    sizes = [f"{kind} {getattr(counted, kind) / 2**20:.1f}" for kind in kinds if getattr(counted, kind)]
    more = "" if counted.activations else ", without activations"
    more += "".join(f". {remark}" for remark in remarks(run.options, stage))
    return f"ZeRO stage {stage}{by}, counted {counted.held / 2**20:.1f} MiB a rank: {', '.join(sizes)}{more}"


def _kernels(trainer: Trainer, train: TrainOptions) -> str:
    device = trainer.device.type
    kind = "torch" if trainer.dtype is torch.float64 else resolved_kernels(device)
    interpreted = ", interpreted" if kind == "triton" and device == "cpu" else ""
    compiled = ", steps by torch.compile" if train.compile else ""
    replayed = f", steps replayed as a CUDA graph after {LAUNCHED} launched ones" if trainer.graph else ""
    return {"torch": "torch's kernels", "triton": "Triton kernels"}[kind] + interpreted + compiled + replayed


def measured(device: torch.device, held_before: int) -> str:
    """Return the memory in use after a step, with the parts that the count leaves out.

    held_before: the bytes that Python and torch held before the model was built.
    """
    held = max(0, held_bytes(device) - held_before)  # less if processes have begun to share pages
    line = f"memory   measured {held / 2**20:.1f} MiB after the first step, with workspaces"
    whole = f"\n         process {memory_bytes(device) / 2**20:.0f} MiB, with Python and torch"
    return line + (whole if device.type == "cpu" else "")


def conclude(
    run: PreparedRun,
    trainer: Trainer,
    tokens: Mixture,
    val_tokens: Mixture,
    *,
    val_loss: float | None,
    saved_step: int | None,
    seconds: float,
    goodput: tuple[float, float] | None,
    pictures: Sequence[str],
) -> None:
    """Print losses, a sample and the files, and draw the losses. Collective, since all ranks generate the sample.

    val_loss: the last one; saved_step: the step of the newest checkpoint; seconds: of this start; goodput: as
    `Reporter.goodput` returns it, on the first rank; pictures: the names of files that the run has drawn.
    """
    start = torch.from_numpy(tokens.sources[0][:1].astype(np.int64)).to(trainer.device)
    ids = trainer.generate(start.unsqueeze(0), min(_SAMPLE_TOKENS, 4 * run.config.n_positions))
    if goodput is None:
        return
    unigram = None
    if min(map(len, val_tokens.sources)) > 0 and sum(map(len, tokens.sources)) <= _COUNTED:
        unigram = unigram_loss(tokens, val_tokens, run.config.vocab_size)
    draw_losses(run.folder, unigram)
    say("\nsample\n------")
    say(run.data.train.tokenizer.decode(ids[0].tolist()))
    say("------")
    if val_loss is not None and unigram is not None:
        rows = [row for row in read_metrics(run.folder / "metrics.jsonl") if row["step"] < trainer.step]
        first = next((f"{row['val_loss']:.4f} -> " for row in rows if row.get("val_loss") is not None), "")
        say(f"validation loss {first}{val_loss:.4f} nats per token")
        say(f"a unigram model, which knows only how often each token occurs, has a loss of {unigram:.4f}")
    wall, share = goodput
    say(f"trained {trainer.step} steps, {seconds:.0f} s; goodput {share:.0%} of {wall:.0f} s since the first start")
    newest = "no checkpoint" if saved_step is None else f"step-{saved_step}/"
    data = ["data/"] if (run.folder / "data").is_dir() else []
    files = ["metrics.jsonl", *pictures, "tensorboard/", "config.toml", "tokenizer.json", *data, newest]
    say(f"files in {run.folder}/: {', '.join(files)}")
    if saved_step is not None:
        prompt = " --prompt 'def '" if run.options.data.path is None else ""
        say(f"more text: {program()} sample {run.folder}{prompt}")
