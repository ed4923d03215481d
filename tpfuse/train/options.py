"""Define the options of all commands as typed dataclasses. Flags, TOML keys and help texts are made from them."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from tyro.conf import Positional, arg

from tpfuse.choices import (
    Balance,
    GradientDtype,
    Implementation,
    Kernels,
    PipelineSchedule,
    Recompute,
    Schedule,
)

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Autocast = Literal["none", "bfloat16", "float16"]
LearningRateSchedule = Literal["cosine", "linear", "constant", "wsd"]
Documents = Literal["attend", "mask"]
Order = Literal["shuffled", "random"]
Preset = Literal["tiny", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m"]


def _hint(default: str) -> str:
    """Return what the help text says of a default path."""
    return "" if default == "None" else f"(default: {default})"


OptionalPath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint=_hint)]
"""An optional path. The help text of such an option says in words what None means."""


T = TypeVar("T")


class Effect(Enum):
    """What a change of an option does to the next step of a run that resumes; each option of `TrainCommand` has one."""

    NUMBERS = "the step computes other numbers"
    ROUNDING = "the step rounds differently"
    NOTHING = "the step computes the same, or what the option names is compared"


Alters = Annotated[T, Effect.NUMBERS]
Rounds = Annotated[T, Effect.ROUNDING]
Keeps = Annotated[T, Effect.NOTHING]


@dataclass(frozen=True)
class ModelOptions:
    """These options set the model: the shape of the GPT, or a model of transformers. A preset sets the whole shape and
    some other options; flags override it."""

    preset: Keeps[Preset] = "tiny"
    """Start from this named configuration. Flags and --config override single values of it."""
    n_layer: Alters[int] = 4
    """Build the model from this number of transformer blocks."""
    n_head: Alters[int] = 4
    """Give each attention layer this number of heads. It must be a multiple of parallel.tp."""
    n_embd: Alters[int] = 128
    """Give each token this number of features. It must be a multiple of n_head."""
    n_positions: Alters[int] = 128
    """Train on sequences of this number of tokens, which is the longest context of the GPT. Default with --model.from:
    1024, or the longest context of that model if it is shorter."""
    bias: Alters[bool] = True
    """Give linear layers and norms biases."""
    dropout: Alters[float] = 0.0
    """Drop values with this probability in training: after the embedding, in attention and on the residual paths."""
    layer_norm_epsilon: Alters[float] = 1e-5
    """Add this number to the variance in each layer norm."""
    from_: Keeps[Annotated[Path | None, arg(name="from", metavar="PATH", help_behavior_hint=_hint)]] = None
    """Train the model of transformers in this Hugging Face folder (config.json) instead of the GPT, with its tokenizer,
    from its weights (safetensors), or from random ones if it has none. Of the options above only --model.n-positions
    may be given then."""


@dataclass(frozen=True)
class DataOptions:
    """These options name the text and its tokenizer."""

    path: Keeps[OptionalPath] = None
    """Read the text from this file, folder of files, or pattern in quotes such as 'fineweb_train_*.bin': text, jsonl,
    parquet, json or csv, compressed or not, or files of tokens (.bin, .npy); or from the sources of a FILE.toml with
    lines such as "web/*.jsonl" = 0.7, the weight. Default: the Python standard library."""
    val_path: Keeps[OptionalPath] = None
    """Read the validation text from here, given as for --data.path. Default: the end of the training tokens."""
    field: Keeps[str] = "text"
    """Take the text of jsonl, parquet, json and csv from this field of their records."""
    tokenizer: Keeps[str] = "bytes"
    """Encode the text with this tokenizer: bytes, chars, gpt2, a FILE.json (of the tokenizers library, or
    tokenizer.json of a run), a FILE.model (of the sentencepiece library), or the folder of one of them. The JSON file
    beside a token file overrides it."""
    documents: Alters[Documents] = "attend"
    """Let tokens attend to all tokens before them in their sequence (attend), or only to those of their own document,
    in which positions begin at 0 (mask). A document begins at the token that the tokenizer has for that, such as
    <|endoftext|>."""
    val_fraction: Alters[float] = 0.1
    """Keep this fraction of the tokens, at their end, for validation if --data.val-path is not given."""
    order: Alters[Order] = "shuffled"
    """Train on windows of the text in this order: shuffled (each token once in an epoch, in an order that changes with
    the epoch) or random (each window begins anywhere). Both follow from the seed and the step alone."""


@dataclass(frozen=True)
class TrainOptions:
    """These options set the length of the training loop, its precision, its evaluations and its checkpoints."""

    steps: Keeps[int] = 1000
    """Train for this number of optimizer steps."""
    batch: Alters[int] = 32
    """Train on this number of sequences in each optimizer step, counted over all ranks."""
    micro_batch: Rounds[int] = 0
    """Process this number of sequences in each forward pass of a rank, and accumulate gradients over the micro-batches
    of a step. 0: all sequences of the rank at once; in a pipeline at least 4 x pp micro-batches, if the batch has so
    many."""
    seed: Alters[int] = 1337
    """Draw the initial weights, the batches and dropout from this seed."""
    dtype: Alters[Dtype] = "float32"
    """Keep parameters and activations in this dtype. With bfloat16 and float16 the optimizer also keeps float32 master
    weights."""
    autocast: Alters[Autocast] = "none"
    """Compute matrix products and attention in this 16-bit dtype (torch.autocast), while parameters, norms, residual
    paths and losses stay in float32. none: compute everything in --train.dtype."""
    deterministic: Rounds[bool] = False
    """Make a repeated run give the same bits on GPUs too, as it does on CPU. Attention then runs by Triton, because the
    gradients of cuDNN's attention differ from run to run."""
    compile: Rounds[bool] = False
    """Run training steps, but not evaluations, by torch.compile. Compiling takes about a minute at the start."""
    recompute: Rounds[Recompute] = "none"
    """Save memory by computing activations again in the backward pass: none of them, selective (attention and the
    MLP's activation), or full (everything but the input of each block)."""
    eval_every: Keeps[int] = 250
    """Evaluate at the start, at the end, and each time this number of steps has passed. 0: never evaluate."""
    eval_batches: Keeps[int] = 20
    """Use this number of batches in each evaluation."""
    save_every: Keeps[int] = 500
    """Save a checkpoint at the end, and each time this number of steps has passed. 0: only at the end."""
    keep: Keeps[int] = 2
    """Keep this number of newest checkpoints and delete older ones. 0: keep all."""
    log_every: Keeps[int] = 10
    """Report loss and speed each time this number of steps has passed."""
    expandable_segments: Keeps[bool] = True
    """Let torch's CUDA allocator grow its segments, which loses less memory to fragmentation."""


@dataclass(frozen=True)
class OptimOptions:
    """These options set AdamW, whose weight decay applies to matrices only, and the schedule of the learning rate.
    Lengths of the schedule are numbers of steps, or numbers of tokens when written as in 375e6tokens."""

    schedule: Alters[LearningRateSchedule] = "cosine"
    """Change the learning rate in this way after its linear warm-up: cosine and linear fall to min_lr at decay_steps,
    wsd (arXiv:2404.06395) stays at lr and falls at the end, constant stays at lr."""
    lr: Alters[float] = 1e-3
    """Use this learning rate at the end of the warm-up, where it is highest."""
    min_lr: Alters[float] = 1e-4
    """Use this learning rate from decay_steps on. Schedule constant does not use it."""
    warmup: Alters[int | str] = 100
    """Raise the learning rate linearly to lr over this number of steps or tokens."""
    decay_steps: Alters[int | str] = 0
    """Reach min_lr at this step, or after this number of tokens. 0: at train.steps. A resumed run keeps the end of its
    schedule, unless this option is given again."""
    decay: Alters[int | str] = 0
    """Let schedule wsd fall over this number of steps or tokens at its end. 0: over a tenth of decay_steps."""
    weight_decay: Alters[float] = 0.1
    """Decay matrices by this coefficient times the learning rate in each step. Vectors do not decay."""
    beta1: Alters[float] = 0.9
    """Average gradients with this decay rate per step in AdamW's first moment."""
    beta2: Alters[float] = 0.99
    """Average squared gradients with this decay rate per step in AdamW's second moment."""
    clip: Alters[float] = 1.0
    """Scale gradients down to this global norm if theirs is larger. 0: do not clip."""


@dataclass(frozen=True)
class ParallelOptions:
    """These options set how ranks share the work, and how they communicate."""

    tp: Rounds[int] = 1
    """Shard the matrices of each layer over this number of tensor-parallel ranks."""
    dp: Rounds[int] = 0
    """Divide the sequences of each batch among this number of data-parallel ranks. 0: the number of GPUs, or of ranks
    that torchrun started, divided by tp x cp x pp; on CPU 1."""
    cp: Rounds[int] = 1
    """Divide the tokens of each sequence among this number of context-parallel ranks."""
    cp_schedule: Rounds[Schedule] = "auto"
    """Let context-parallel ranks attend to each other's tokens in this way: ring (keys and values move from rank to
    rank), all_gather (every rank fetches all keys and values), ulysses (ranks exchange heads for tokens; cp must divide
    the heads of a rank), ulysses_ring (both), or auto, which chooses one of them."""
    cp_balance: Rounds[Balance] = "zigzag"
    """Give each context-parallel rank these tokens of a sequence: zigzag (a chunk from the front and one from the end,
    which gives all ranks equal work in causal attention), contiguous (one chunk) or striped (every cp-th token)."""
    cp_ulysses: Rounds[int] = 0
    """Let groups of this number of ranks exchange heads under schedule ulysses_ring. 0: the largest divisor of cp,
    below cp, that divides the heads of a rank."""
    pp: Rounds[int] = 1
    """Cut the layers into pipeline stages on this number of ranks. The micro-batches of --train.micro-batch pass from
    rank to rank."""
    pp_schedule: Rounds[PipelineSchedule] = "1f1b"
    """Let pipeline ranks compute in this order: gpipe (all forward passes first), 1f1b (one forward, one backward),
    interleaved_1f1b (several stages on each rank), zero_bubble (weight gradients fill idle time), or zbv (zero_bubble
    with two stages on each rank, of which the first rank has the first and the last)."""
    pp_stages_per_rank: Rounds[int] = 0
    """Give each pipeline rank this number of stages. 0: 2 for interleaved_1f1b and zbv, 1 for the others."""
    pp_layers: Rounds[str] = ""
    """Give the stages these numbers of layers, in the order of the model, as in 3,5,4,4. Default: cut the layers so
    that all pipeline ranks have about equally many operations, counted with embedding and head."""
    replicas: Rounds[int] = 1
    """Let ZeRO stage 3 shard the parameters within each of this number of groups of ranks. It must divide dp x cp. With
    as many groups as nodes, ranks gather parameters within their node only."""
    impl: Rounds[Implementation] = "auto"
    """Let tensor-parallel GEMMs and ZeRO communicate by this implementation: fused (Triton kernels), direct (shared
    memory of CPU ranks), collective (NCCL, Gloo), or auto, which chooses one of them."""
    measure_seconds: Rounds[float] = -1.0
    """For impl auto, spend at most this number of seconds in the first step on measuring which implementation of each
    product is the fastest on this machine. 0: measure nothing. -1: 20 on GPUs, 0 on CPU, where direct is the
    fastest."""


@dataclass(frozen=True)
class ZeroOptions:
    """These options set which state of the model data-parallel ranks shard among themselves (ZeRO, arXiv:1910.02054).
    Context-parallel ranks count as data-parallel ranks here."""

    stage: Rounds[int] = 0
    """Stage of ZeRO. 0: shard nothing; 1: the optimizer's state; 2: also the gradients; 3: also the parameters."""
    gradient_dtype: Alters[GradientDtype] = "float32"
    """Dtype in which gradients are accumulated and kept: float32, or parameter for the parameters' dtype. Stage 3
    accepts only float32."""
    reduce_dtype: Alters[Literal["gradient", "float32", "parameter"]] = "gradient"
    """Dtype in which gradients are sent to other ranks: float32, parameter for the parameters' dtype, or gradient for
    the dtype in which they are kept."""
    offload: Rounds[str] = "none"
    """Place of the optimizer's state: none (the device), host (the host's memory), or a folder on a local disk."""
    compression: Alters[str] = "none"
    """Compression of the gradients that nodes send to each other: none, bf16, or powersgd-RANK (products of two
    matrices of this rank), as in powersgd-4. Within a node, gradients are never compressed."""


@dataclass(frozen=True)
class CommOptions:
    """These options set how ranks wait for each other."""

    timeout: Keeps[float] = 60.0
    """Wait at most this number of seconds for another rank. Then all ranks end with an error that names it."""


@dataclass(frozen=True)
class DebugOptions:
    """These options switch on checks that help to find a fault but cost time."""

    fingerprint: Keeps[bool] = False
    """Compare the name, shape and dtype of each operation between ranks before it begins. If they differ, all ranks
    end and show both sides."""


@dataclass(frozen=True)
class ProfileOptions:
    """These options record what the ranks do in some steps. `tpfuse profile` sets them and explains the result."""

    steps: Keeps[str] = "3:5"
    """Record these steps: one number, or the first and the last as in 3:5. The first step of a run is step 1."""
    trace: Keeps[OptionalPath] = None
    """Write the spans of every rank to this folder: layers, operators, communication, and waits for other ranks."""
    torch: Keeps[OptionalPath] = None
    """Write the trace of torch.profiler and a snapshot of the memory of every rank to this folder."""
    nvtx: Keeps[bool] = False
    """Mark steps, layers and operators for Nsight Systems, as NVTX ranges of the domain tpfuse, in all steps."""


@dataclass(frozen=True)
class TrainCommand:
    """Train a GPT on text, on one rank or many."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    comm: CommOptions = field(default_factory=CommOptions)
    debug: DebugOptions = field(default_factory=DebugOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    kernels: Rounds[Kernels] = "auto"
    """Compute with these kernels: auto (Triton on GPUs, torch on CPU), triton (slow on CPU, where it is interpreted) or
    torch."""
    out: Keeps[OptionalPath] = None
    """Write all files of the run to this folder. Without --resume it must be new or empty. Default: runs/DATE-TIME."""
    init_from: Keeps[OptionalPath] = None
    """Start at step 0 from the weights in this folder of another run, or of a Hugging Face GPT-2 (config.json,
    model.safetensors), and take the model's shape and the tokenizer from there too. A smaller --model.n-positions cuts
    the position table. Default: random weights."""
    resume: Keeps[bool] = False
    """Continue from the newest good checkpoint in the run folder --out, with the configuration of that run. Flags
    override it."""
    config: Keeps[OptionalPath] = None
    """Read options from this TOML file, such as n_layer in a table [model]. The config.toml of a run is such a file."""


@dataclass(frozen=True)
class PrepareDataOptions:
    """These options name the text and its tokenizer."""

    path: OptionalPath = None
    """Read the text from here, given as for `tpfuse train`. Default: the Python standard library."""
    field: str = "text"
    """Take the text of jsonl, parquet, json and csv from this field of their records."""
    tokenizer: str = "bytes"
    """Encode the text with this tokenizer, given as for `tpfuse train`."""


@dataclass(frozen=True)
class PrepareCommand:
    """Turn text into a token file, which `tpfuse train` reads from the disk."""

    out: Path
    """Write tokens.bin and tokens.json to this folder."""
    data: PrepareDataOptions = field(default_factory=PrepareDataOptions)
    config: OptionalPath = None
    """Read these options from a table [data] in this TOML file."""


@dataclass(frozen=True)
class EvaluateDataOptions:
    """These options name the text to evaluate on."""

    path: OptionalPath = None
    """Evaluate on this text or these token files, given as for `tpfuse train`. Default: the run's validation tokens."""
    field: str = "text"
    """Take the text of jsonl, parquet, json and csv from this field of their records."""


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure the loss of a model on a whole text, on one rank.

    FOLDER is a run of `tpfuse train`, or a model of Hugging Face.
    """

    data: EvaluateDataOptions = field(default_factory=EvaluateDataOptions)
    length: int = 0
    """Predict the text in windows of this number of tokens. 0: as long as the sequences of training."""


@dataclass(frozen=True)
class SampleCommand:
    """Generate text with a model.

    FOLDER is a run of `tpfuse train`, or a model of Hugging Face.
    """

    prompt: Annotated[str, arg(help_behavior_hint="(default: a line break)")] = "\n"
    """Continue this text."""
    prompt_file: OptionalPath = None
    """Continue the text in this UTF-8 file. Default: the text of --prompt."""
    samples: int = 1
    """Generate this number of texts, each drawn independently."""
    tokens: int = 256
    """Generate at most this number of tokens for each text."""
    temperature: float = 0.8
    """Divide the logits by this number before drawing a token. 0: take the most probable token."""
    top_k: int = 0
    """Draw each token from this number of most probable tokens. 0: from all tokens."""
    top_p: float = 1.0
    """Draw each token from the smallest set of most probable tokens whose probabilities sum to at least this. 1: from
    all tokens."""
    seed: int = 0
    """Draw tokens from this seed."""


@dataclass(frozen=True)
class ExportCommand:
    """Write the newest good checkpoint of a run for Hugging Face's transformers.

    The GPT becomes a GPT-2, which `tpfuse train --init-from` can read too.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Read the checkpoint from this folder, which `tpfuse train` has written."""
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Write the model to this folder, which must be new or empty."""


@dataclass(frozen=True)
class MemoryCommand:
    """Count the memory that each rank of a training run will hold.

    MODEL is a preset, a TOML file of `tpfuse train`, or a Hugging Face folder.
    """

    ranks: int = 0
    """Count for this number of ranks in total. 0: tp x cp x dp x pp of the configuration."""
    tp: int = 0
    """Count for this number of tensor-parallel ranks. 0: the number in the configuration."""
    cp: int = 0
    """Count for this number of context-parallel ranks. 0: the number in the configuration."""
    pp: int = 0
    """Count for this number of pipeline ranks. 0: the number in the configuration."""
    stage: Literal["all", "0", "1", "2", "3"] = "all"
    """Count for this stage of ZeRO. all: show one column for each stage."""
    micro_batch: int = 0
    """Count for this number of sequences in each forward pass of a rank. 0: the number in the configuration."""
    recompute: Literal["config", "none", "selective", "full"] = "config"
    """Count the activations that are kept when the backward pass computes these again: none, selective (attention and
    the MLP's activation) or full (everything but the input of each block). config: as the configuration says."""
    vocab_size: int = 0
    """Count for a vocabulary of this number of tokens. 0: the vocabulary of the configuration's tokenizer."""


@dataclass(frozen=True)
class PlanCommand:
    """Predict which layout trains a model fastest, how fast, in how much memory.

    Without --calibrate nothing is measured on this machine, and no GPU is needed.
    """

    model: str = ""
    """Plan for this model: a preset, a TOML file of `tpfuse train`, or a config.json of Hugging Face or its folder."""
    layers: int = 0
    """Without --model, plan for a GPT with this number of transformer blocks."""
    width: int = 0
    """Without --model, plan for a GPT with this number of features of each token."""
    heads: int = 0
    """Without --model, plan for a GPT with this number of attention heads in each layer."""
    vocab_size: int = 0
    """Plan for a vocabulary of this number of tokens. 0: the vocabulary of the model's tokenizer; without --model that
    of GPT-2."""
    tokens: int = 0
    """Plan for training sequences of this number of tokens. 0: as the preset or the TOML file says; for other models
    1024, or the model's context if that is shorter."""
    batch: int = 0
    """Plan for steps of this number of sequences over all ranks. 0: as the preset or the TOML file says; for other
    models the smallest multiple of --gpus with at least 2**20 tokens."""
    gpus: int = 8
    """Plan for this number of GPUs in total."""
    gpu: str = "h100"
    """Plan for GPUs of this kind, such as h100 or a100, or for those that a FILE.toml describes, with their links."""
    nodes: int = 0
    """Divide the GPUs among this number of nodes. 0: nodes of 8 GPUs."""
    network: str = "400Gb"
    """Connect the nodes by a network of this bandwidth for each GPU, in bits per second."""
    json: str = ""
    """Write all layouts that fit, with their times and memory, to this JSON file. -: print them instead of the
    report."""
    toml: OptionalPath = None
    """Write the options of the best layout to this file, for `tpfuse train --config`."""
    calibrate: OptionalPath = None
    """Plan nothing, but measure the GPUs of this machine and write this TOML file, for --gpu. This takes about half a
    minute."""


@dataclass(frozen=True)
class WatchCommand:
    """Show the metrics of a run in a browser of this machine.

    RUN is a folder that `tpfuse train` has written, or is writing.
    """

    port: int = 8800
    """Serve the page at this port of 127.0.0.1. 0: at any free port."""


@dataclass(frozen=True)
class HangCommand:
    """Say which rank the others waited for, and show the Python stack of each.

    RUN is the folder of a run of `tpfuse train` that a time-out has ended.
    """


@dataclass(frozen=True)
class ProfileCommand:
    """Run some steps of a training under a profiler, and explain what they show.

    After -- comes a preset, a TOML file or a command, with its options, as in:

    tpfuse profile -- tiny --parallel.tp 2

    `tpfuse profile summary FOLDER` explains what another program has recorded.

    `tpfuse profile compare A B` compares two profiles.
    """

    with_: Annotated[Literal["trace", "nsys", "ncu", "torch"], arg(name="with")] = "trace"
    """Record by this profiler: trace (tpfuse's own, also on CPU), nsys (Nsight Systems), ncu (Nsight Compute) or torch
    (torch.profiler, with a snapshot of the memory)."""
    steps: str = "3:5"
    """Record these steps: one number, or the first and the last as in 10:12. The run ends after them."""
    kernel: str = ""
    """With ncu, measure the kernels whose names this regular expression matches. Kernels that wait for other ranks need
    no command: tpfuse launches them as one rank alone."""
    out: OptionalPath = None
    """Write all files to this folder, which must be new or empty. Default: profiles/DATE-TIME."""
    print: bool = False
    """Print the commands that would run, and run nothing."""


@dataclass(frozen=True)
class ProfileSummaryCommand:
    """Explain the traces in a folder: those of `tpfuse profile`, or of tpfuse.profile.record in another program."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Read the traces from this folder, and write the summary and the picture there."""


@dataclass(frozen=True)
class ProfileCompareCommand:
    """Compare two profiles. The exit status is 1 if an operator, or the whole step, became slower."""

    before: Annotated[Positional[Path], arg(metavar="A")]
    """Read the first profile from this folder, which `tpfuse profile` has written."""
    after: Annotated[Positional[Path], arg(metavar="B")]
    """Read the second profile from this folder."""
    slower: float = 0.1
    """Report what takes longer than in A by more than this share."""


@dataclass(frozen=True)
class TuneCommand:
    """Measure tile sizes of the kernels on this GPU and write them into a table.

    OPERATOR is the name of a kernel, such as gemm. Default: all kernels.
    """

    out: OptionalPath = None
    """Write the whole table to this file. Default: kernels/configurations.toml."""
    minutes: float = 0.0
    """Start no further measurement after this number of minutes. 0: no limit."""


@dataclass(frozen=True)
class DoctorCommand:
    """Find out what of this machine makes tpfuse fail or slow, and what it will use.

    The exit status is 1 if something will fail. Notes do not change it.
    """

    json: bool = False
    """Print one JSON document instead of text."""


@dataclass(frozen=True)
class VerifyCommand:
    """Compare every kernel with its reference on this machine, and compile it.

    This takes some minutes on two CPU cores. The exit status is 1 if one fails.
    """

    operators: Annotated[tuple[str, ...], arg(metavar="OPERATOR ...", help_behavior_hint="(default: all)")] = ()
    """Verify these operators, such as gemm. The name training stands for two training steps of the small GPT on
    two ranks with each implementation of tensor parallelism."""
    json: bool = False
    """Print one JSON document instead of tables."""
    compile: bool = True
    """Also compile the kernels, and show their registers, spills and shared memory. The target is the GPU of this
    machine, or sm_90 if there is none."""
